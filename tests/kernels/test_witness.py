"""The witness model: its answers do not depend on how they were served, and see one wrong byte."""

import pytest
import trio

from kvlease.kernels.models.witness_model import PAGE_TOKENS, VOCAB_SIZE, WitnessModel
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import open_engine
from kvlease.runtime.request import GenerateResult
from tests.runtime.toy import answer, same

PROMPTS = [[(7 * seed + 13 * i) % VOCAB_SIZE for i in range(14 + 2 * seed)] for seed in range(5)]
PARAMS = SamplingParams(max_tokens=6)
COLD = EngineConfig(device_pages=64, host_pages=0, prefix_cache=False, max_sessions=1, digests=True)


class Damage:
    """Changes one byte behind one component's loads."""

    def __init__(self, component: str) -> None:
        self.component = component
        self.num_done = 0

    def copy(self, order: CopyOrder) -> int:
        moved = order.run()
        if order.kind == "load" and order.component == self.component:
            piece = order.target()[-1]
            piece[-1] = (piece[-1] + 1) % 251
            self.num_done += 1
        return moved


async def serve(config: EngineConfig, ports: EnginePorts | None = None) -> list[GenerateResult]:
    """Answer all prompts together, twice, so that the second round finds cached pages."""
    results: list[GenerateResult] = []
    async with open_engine(WitnessModel(), config, ports=ports) as engine:
        for _ in range(2):
            found: dict[int, GenerateResult] = {}

            async def ask(number: int, found: dict[int, GenerateResult]) -> None:
                found[number] = await answer(engine, PROMPTS[number], PARAMS)

            async with trio.open_nursery() as nursery:
                for number in range(len(PROMPTS)):
                    nursery.start_soon(ask, number, found)
            results += [found[number] for number in range(len(PROMPTS))]
    return results


def pressed(chunk_tokens: int, device_pages: int) -> EngineConfig:
    return EngineConfig(
        device_pages=device_pages,
        host_pages=64,
        tail_every=2,
        max_sessions=4,
        chunk_tokens=chunk_tokens,
        digests=True,
        poison=True,
        load_or_recompute=False,
    )


@pytest.mark.parametrize("chunk_tokens", [3, PAGE_TOKENS, 7, 64])
@pytest.mark.parametrize("device_pages", [9, 64])
async def test_answers_do_not_depend_on_how_they_were_served(
    chunk_tokens: int, device_pages: int
) -> None:
    with trio.fail_after(60):
        cold = await serve(COLD)
        served = await serve(pressed(chunk_tokens, device_pages))
    assert len({result.tokens for result in cold}) == len(PROMPTS)
    assert all(same(one, other) for one, other in zip(served, cold, strict=True))


@pytest.mark.parametrize(
    "component", ["latent", "index_k", "window", "compressor_kv", "index_compressor_gate"]
)
async def test_one_wrong_byte_of_any_component_is_seen(component: str) -> None:
    damage = Damage(component)
    with trio.fail_after(60):
        cold = await serve(COLD)
        served = await serve(pressed(64, 9), EnginePorts(copier=damage))
    assert damage.num_done
    assert not all(same(one, other) for one, other in zip(served, cold, strict=True))
