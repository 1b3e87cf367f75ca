"""An engine on a GPU: answers are the same bit for bit, whatever happened to their prefixes."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import final

import pytest
import torch
import trio

from kvlease.errors import ConfigError
from kvlease.kernels.models.deepseek_v4 import DeepseekV4, ModelOptions
from kvlease.kernels.models.embedded import RandomTensors
from kvlease.kernels.models.weights import build_weights
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.ports import Completion, CopyOrder, Stream
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.counters import Statistics
from kvlease.runtime.cuda_streams import open_cuda_streams
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.request import GenerateResult
from kvlease.runtime.stream_scope import WaitObserver
from kvlease.runtime.streams import EngineStreams
from tests.runtime.cuda.devices import CYCLES_PER_S, Barrier, CudaDevice
from tests.runtime.test_audit import bytes_of, flip_one_bit, matched
from tests.runtime.toy import PAGE, TOY, FaultyCopier, answer, prompt_of, same, toy_config

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
gpu_config = partial(toy_config, device="cuda", device_pages=48, host_pages=400)
Case = tuple[list[int], GenerateResult]
HELD_S = 20e-3
"""How long the first reader of a load is held at least, less what the device still had to do."""


@pytest.fixture
def model() -> DeepseekV4:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    return gpu_model()


@cache
def gpu_model() -> DeepseekV4:
    weights = build_weights(TOY, RandomTensors(TOY, 0), torch.float32, torch.device("cuda"))
    return DeepseekV4(TOY, weights, "toy 0", ModelOptions(page_tokens=PAGE, device="cuda"))


async def assert_cold_runs_agree(model: DeepseekV4, cases: list[Case]) -> None:
    config = gpu_config(prefix_cache=False, host_pages=0, chunk_tokens=4096, max_sessions=1)
    known: dict[tuple[int, ...], GenerateResult] = {}
    async with open_engine(model, config) as engine:
        for prompt, result in cases:
            key = tuple(prompt)
            if key not in known:
                known[key] = await answer(engine, prompt, PARAMS)
            assert same(result, known[key]), f"of {len(prompt)} tokens: {known[key].tokens}"


async def serve(engine: Engine, sessions: int, turns: int) -> list[Case]:
    """Run sessions side by side, each with a prompt that grows by its answers."""
    cases: list[Case] = []

    async def session(number: int) -> None:
        prompt = prompt_of(number, 90 + 10 * number, 64)
        for turn in range(turns):
            result = await answer(engine, prompt, PARAMS)
            cases.append((prompt, result))
            prompt = [*prompt, *result.tokens, *prompt_of(100 * turn + number, 25)]

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for number in range(sessions):
                nursery.start_soon(session, number)
    return cases


@final
class LateLoads:
    """Holds loads back, once asked to, until compute has stood behind one of them for a while."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._barrier: Barrier | None = None

    def hold_back(self) -> None:
        """Let no load pass from now on; every kernel must have been used before."""
        self._barrier = self._device.barrier()

    def hold(self, order: CopyOrder) -> None:
        """Hold a load's copy; on the worker that carries it."""
        if order.kind == "load" and self._barrier is not None:
            self._barrier.hold()

    def release(self) -> None:
        """Let them go; run right behind a wait, which holds the device and not the worker."""
        if self._barrier is not None and not self._barrier.is_open:
            time.sleep(HELD_S)
            self._barrier.open()

    async def give_up(self) -> None:
        """Let them go although nobody came, before they are late."""
        await trio.sleep(3)
        self.release()


def jitter(longest_s: float, loads: LateLoads | None = None) -> FaultyCopier:
    """Return a copier whose copies come late on the device, long after they were recorded."""
    rng = random.Random(0)

    def delay(order: CopyOrder) -> int | None:
        if loads is not None:
            loads.hold(order)
        torch.cuda._sleep(int(CYCLES_PER_S * longest_s * rng.random()))  # type: ignore[no-untyped-call]
        return None

    return FaultyCopier(delay)


def assert_ledger(statistics: Statistics) -> None:
    assert statistics.ledger_ok, statistics.ledger_error


@final
class Releasing:
    """A compute stream that lets late loads go when it has begun to stand behind one."""

    def __init__(self, stream: Stream, loads: LateLoads) -> None:
        self._stream = stream
        self._loads = loads

    def launch(self, work: Callable[[], None]) -> None:
        self._stream.launch(work)

    def wait(self, completion: Completion) -> None:
        self._stream.wait(completion)
        self._stream.launch(self._loads.release)

    def record(self) -> Completion:
        return self._stream.record()

    def scope(self) -> Stream:
        return Releasing(self._stream.scope(), self._loads)


@asynccontextmanager
async def releasing(loads: LateLoads, observer: WaitObserver) -> AsyncGenerator[EngineStreams]:
    async with open_cuda_streams(observer) as streams:
        yield EngineStreams(Releasing(streams.compute, loads), streams.load, streams.store)


@pytest.mark.gpu
async def test_sessions_with_restores_and_late_copies(model: DeepseekV4) -> None:
    device = CudaDevice()
    loads = LateLoads(device)
    ports = EnginePorts(copier=jitter(5e-3, loads), streams=partial(releasing, loads))
    try:
        async with open_engine(model, gpu_config(), ports=ports) as engine:
            cases = await serve(engine, 10, 3)
            before = engine.statistics().counters
            loads.hold_back()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(loads.give_up)
                cases += await serve(engine, 10, 1)
                nursery.cancel_scope.cancel()
            statistics, stalls = engine.statistics(), engine.stalls()
    finally:
        device.close()
    counters = statistics.counters
    assert counters.loads > 0
    assert counters.restored_bytes > 0
    assert counters.failed_transfers == 0
    assert counters.loads > before.loads, "nothing was held back"
    assert counters.gate_wait_s - before.gate_wait_s > HELD_S / 2, "late copies held nobody"
    by_layer = sum(total.seconds for (tier, _), total in stalls.items() if tier == "host")
    assert by_layer == pytest.approx(counters.gate_wait_s)
    assert_ledger(statistics)
    await assert_cold_runs_agree(model, cases)


@pytest.mark.gpu
async def test_loads_that_fail_are_computed_again(model: DeepseekV4) -> None:
    rng = random.Random(1)

    def fail(order: CopyOrder) -> int | None:
        if order.kind == "load" and rng.random() < 0.2:
            raise ValueError("the link is down")
        return None

    ports = EnginePorts(copier=FaultyCopier(fail))
    async with open_engine(model, gpu_config(), ports=ports) as engine:
        cases = await serve(engine, 7, 2)
        statistics = engine.statistics()
    assert statistics.counters.failed_transfers > 0
    assert_ledger(statistics)
    await assert_cold_runs_agree(model, cases)


@pytest.mark.gpu
async def test_clients_that_leave_half_way_cost_nobody_anything(model: DeepseekV4) -> None:
    rng = random.Random(2)
    ports = EnginePorts(copier=jitter(300e-6))
    async with open_engine(model, gpu_config(), ports=ports) as engine:
        await serve(engine, 6, 1)

        async def leave(number: int) -> None:
            with trio.move_on_after(rng.uniform(0, 0.08)):
                await answer(engine, prompt_of(number, 90 + 10 * number, 64), PARAMS)

        for _ in range(4):
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(leave, number)
        cases = await serve(engine, 4, 2)
        statistics = engine.statistics()
    assert statistics.counters.cancelled > 0
    assert_ledger(statistics)
    await assert_cold_runs_agree(model, cases)


@pytest.mark.gpu
async def test_the_audit_finds_a_changed_page_and_nothing_else(model: DeepseekV4) -> None:
    config = gpu_config(audit_rate=1.0)
    prompt = prompt_of(50, 6 * PAGE + 5)
    async with open_engine(model, config) as engine:
        cases = await serve(engine, 5, 2)
        counters = engine.statistics().counters
        assert counters.audited_pages > 0
        assert counters.audit_mismatches == 0
        cases.append((prompt, await answer(engine, prompt, PARAMS)))
        with matched(engine, prompt) as match:
            rows, _ = bytes_of(engine, match, 2, 1, "latent")
        flip_one_bit(rows, random.Random(3))
        cases.append((prompt, await answer(engine, prompt, PARAMS)))
        statistics = engine.statistics()
    assert statistics.counters.audit_mismatches == 1
    assert_ledger(statistics)
    await assert_cold_runs_agree(model, cases)


def test_a_gpu_is_asked_for_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")

    async def main() -> None:
        async with open_engine(None, EngineConfig(device="cuda")):
            pass

    with pytest.raises(ConfigError, match=r"^device is cuda, but .*; give device cpu"):
        trio.run(main)


def test_nothing_to_compute_needs_no_gpu() -> None:
    async def main() -> None:
        async with open_engine(None, EngineConfig(device="cuda", compute="none")):
            pass

    with pytest.raises(ConfigError, match="compute is none"):
        trio.run(main)
