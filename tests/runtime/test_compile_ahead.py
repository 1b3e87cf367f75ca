"""An engine compiles its model's kernels before the first request, and can be stopped doing so."""

import time
from collections.abc import Callable

import pytest
import trio

import kvlease
from kvlease.kernels.models.deepseek_v4 import ModelOptions, load_model
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.runtime import models
from kvlease.services.bench.wrapped import WaitsForAll

CONFIG = EngineConfig(device_pages=9, host_pages=0, max_sessions=3, compile_ahead=True)


class HasKernels(WaitsForAll):
    """The embedded model, with some kernels that take their time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(load_model(None, ModelOptions(page_tokens=64)))
        self.seconds, self.asked = seconds, list[tuple[int, int]]()

    def compile_ahead(self, sessions: int, pages: int, told: Callable[[int, int], None]) -> int:
        self.asked.append((sessions, pages))
        end = time.monotonic() + self.seconds
        told(1, 2)
        while time.monotonic() < end:
            time.sleep(0.01)
            told(1, 2)
        told(2, 2)
        return 2


async def test_kernels_are_compiled_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(models, "TELL_EVERY_S", 0.0)
    model = HasKernels(0.0)
    async with kvlease.open_engine(model, CONFIG) as engine:
        assert model.asked == [(3, 9)]
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=2)) as stream:
            assert len((await stream.drain()).tokens) == 2
    assert "1 of 2 done" in caplog.text


async def test_compiling_can_be_cancelled() -> None:
    with trio.fail_after(20), trio.move_on_after(0.1) as scope:
        async with kvlease.open_engine(HasKernels(60.0), CONFIG):
            raise AssertionError("the engine opened before its kernels were compiled")
    assert scope.cancelled_caught
