"""The engine over the model by kernels: chunks, batches that grow and shrink, a cached prefix."""

from typing import cast

import pytest
import torch
import trio

import kvlease
from kvlease.kernels.models.deepseek_v4 import DeepseekV4
from kvlease.protocols.config import Device, EngineConfig, SamplingParams
from tests.kernels.gpu.test_device_model import CONFIG, make_model

TOKENS = 3
PAGE = 32


async def answers(model: DeepseekV4, device: Device) -> tuple[list[list[int]], int]:
    """Two requests at once, then the first again; return answers and tokens found cached."""
    config = EngineConfig(
        device=device, dtype="bfloat16", device_pages=32, host_pages=32, exact=False,
        chunk_tokens=16, tail_every=1,
    )  # fmt: skip
    found: dict[int, list[int]] = {}
    prompts = [[(k * n) % CONFIG.vocab_size for k in range(PAGE + 3 * n)] for n in (1, 3)]
    hits = 0

    async with kvlease.open_engine(model, config) as engine:

        async def one(name: int, prompt: list[int]) -> None:
            nonlocal hits
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
            async with engine.generate(prompt, params) as stream:
                result = await stream.drain()
            found[name] = list(result.tokens)
            hits += result.usage.hit_device

        async with trio.open_nursery() as nursery:
            for number, prompt in enumerate(prompts):
                nursery.start_soon(one, number, prompt)
        await one(2, prompts[0])
    return [found[number] for number in range(3)], hits


@pytest.mark.slow
async def test_the_engine_answers_by_kernels_as_by_plain_torch(device: str) -> None:
    where = cast("Device", device)
    by_kernels, hits = await answers(make_model(CONFIG, "bf16", device, by_kernels=True), where)
    plain, _ = await answers(make_model(CONFIG, "bf16", device, by_kernels=False), where)
    assert by_kernels[0] == by_kernels[2], "a cached prefix changed the answer"
    assert hits == PAGE, "nothing was served from the cache"
    assert all(len(answer) == TOKENS for answer in by_kernels)
    if not torch.cuda.is_available():
        assert by_kernels == plain, "these prompts hold no near tie"
