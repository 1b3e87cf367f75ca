"""C02: rows that were copied away before the work that writes them had ended."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import trio
from attrs import define

from kvlease.errors import NotReady, TransferFailed
from kvlease.pools.prefix_node import Node
from kvlease.pools.storage import span_components
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.ports import CompletionState, StepInput
from kvlease.protocols.schema import IndexedLayer
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.completions import CompletionBase, CpuCompletion
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.request import GenerateResult
from kvlease.runtime.streams import InlineStream
from kvlease.runtime.transfer import Transfer
from kvlease.units import LayerId
from tests.museum.held_steps import HeldSteps, all_stored
from tests.museum.rig import MLA, ROOT, Bench, is_same, tokens_of
from tests.museum.rig import PAGE as BENCH_PAGE
from tests.runtime.rig import grid, order, plan
from tests.runtime.test_engine import assert_whole, at_rest
from tests.runtime.toy import (
    COLD,
    PAGE,
    FaultyCopier,
    answer,
    prompt_of,
    random_delays,
    same,
    toy_config,
    toy_model,
)

PROMPT = prompt_of(1, 3 * PAGE + 5)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


def edges(engine: Engine) -> list[Node]:
    """List every edge of the engine's index."""
    nodes = [*engine._core.pool.index.tree.roots.values()]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def assert_copies_agree(engine: Engine) -> int:
    """Hold every host page whose device page is there against it; return how many there were."""
    memory, compared = engine._core.pool.memory, 0
    for node in edges(engine):
        if node.device.pages is None or node.host.pages is None or node.host.arrival is not None:
            continue
        for device, host in zip(node.device.pages, node.host.pages, strict=True):
            compared += 1
            for layer, span in span_components(engine.model.schema):
                there = memory.host_spans.rows(layer, span.name)[host]
                assert is_same(there, memory.spans.rows(layer, span.name)[device])
                assert not bool(there.isnan().any())
    return compared


@pytest.mark.parametrize(("start", "stored_before"), [(0, 0), (32, 0), (53, 3), (63, 3)])
async def test_no_store_before_the_step_that_writes_has_ended(
    start: int, stored_before: int
) -> None:
    """K013 vllm#45704 (F03): tokens counted as confirmed were stored while their kernel still ran.

    The step that starts at ``start`` is held: the first chunk, a later one, a decode step inside a
    page, and the one that fills a page. Nothing of it may be on the host, nor asked for.
    """

    def matches(inputs: StepInput) -> bool:
        return any(part.start == start for part in inputs.sequences)

    model = HeldSteps(matches)
    copier = FaultyCopier(lambda _order: None)
    async with open_engine(model, toy_config(tail_every=1), ports=EnginePorts(copier)) as engine:
        got = list[GenerateResult]()

        async def run() -> None:
            got.append(await answer(engine, PROMPT, PARAMS))

        try:
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run)
                    await model.wait_reached()
                    await trio.sleep(0.03)
                    assert engine.statistics().host.sealed == stored_before
                    stored = [seen for seen in copier.seen if seen[0] == "store"]
                    assert bool(stored) == bool(stored_before)
                    assert len(edges(engine)) == 1 or start > 0, "sealed before it was written"
                    model.go.set()
        finally:
            model.go.set()
        assert same(got[0], await COLD.answer(PROMPT, PARAMS))
        assert_whole(await at_rest(engine))
        await all_stored(engine)
        assert assert_copies_agree(engine) >= 4


async def test_stored_rows_are_final_under_random_delays() -> None:
    """K013 vllm#45704 (F03): the copy engine was free to read a page in any order, at any time."""
    params = SamplingParams(max_tokens=18, ignore_eos=True)
    copier = FaultyCopier(random_delays(5, 0.002))
    config = toy_config(device_pages=40, host_pages=200, tail_every=1)
    async with open_engine(toy_model(), config, ports=EnginePorts(copier)) as engine:
        for round_ in range(2):
            async with trio.open_nursery() as nursery:
                for seed in range(5):
                    prompt = prompt_of(10 * round_ + seed, 40 + 7 * seed)
                    nursery.start_soon(answer, engine, prompt, params)
            await all_stored(engine)
            assert assert_copies_agree(engine) > 0
        assert engine.statistics().counters.failed_transfers == 0


def _unissued() -> CompletionBase:
    return CpuCompletion("work that nobody recorded")


def _planned_layer() -> CompletionBase:
    return Transfer(plan(*grid(2, "latent"))).layer_completion(LayerId(0))


def _of_nothing() -> CompletionBase:
    return Transfer(plan(num_layers=2, empty=frozenset({0, 1})))


def _forgotten_layer() -> CompletionBase:
    transfer = Transfer(plan(order(0, "latent"), num_layers=2))
    return transfer.layer_completion(LayerId(1))


Make = Callable[[], CompletionBase]
FENCES: list[Make] = [_unissued, _planned_layer, _of_nothing, _forgotten_layer]


@define(eq=False)
class Filling:
    """A transfer as readers see it, with the fence under test for every layer."""

    fence: CompletionBase
    name: str = "load 1"
    is_done: bool = False

    def layer_completion(self, layer: LayerId) -> CompletionBase:
        """Return the fence."""
        return self.fence


@pytest.mark.parametrize("make", FENCES)
async def test_a_fence_that_nobody_set_never_passes(make: Make) -> None:
    """K015 bytedance-iaas/sglang#471 (F02): the fence was null in a subclass; null meant no wait.

    Every consumer of every kind of missing fence: an error or a wait, never a pass.
    """
    fence = make()
    ran: list[int] = []
    stream = InlineStream().scope()
    with pytest.raises((NotReady, TransferFailed)):
        stream.wait(fence)
        stream.launch(lambda: ran.append(1))
        stream.record().raise_if_failed()
    assert ran == []
    for wait in (fence.wait_recorded, fence.wait_done):
        passed = False
        with trio.move_on_after(0.01), suppress(TransferFailed):
            await wait()
            passed = True
        assert not passed
    assert fence.state is not CompletionState.DONE


@pytest.mark.parametrize("make", FENCES)
async def test_a_lease_does_not_open_behind_a_fence_that_nobody_set(make: Make) -> None:
    """K015 bytedance-iaas/sglang#471 (F02): the same, by the door that readers come through."""
    bench, prompt = Bench(MLA), tokens_of(1, 2 * BENCH_PAGE)
    bench.cache_on_host(prompt)
    held = bench.start(prompt)
    assert held.load is not None
    held.load.carrier = Filling(make())
    opened = False
    with bench.pool.lease_prefix(ROOT, prompt) as lease:
        layer = MLA.layers[0]
        assert isinstance(layer, IndexedLayer)
        with pytest.raises(NotReady):
            lease[layer].resolve_nowait()
        with trio.move_on_after(0.01), suppress(TransferFailed):
            await lease[layer].resolve(InlineStream())
            opened = True
        assert not opened


def test_poison_is_what_an_early_store_would_show() -> None:
    """Otherwise the comparison above could not see a page stored before it was written."""
    assert bool(torch.full((4,), 0xFF, dtype=torch.uint8).view(torch.float32).isnan().all())
