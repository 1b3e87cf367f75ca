"""What came through the doors of the engine as a traceback, or took others with it."""

import math
import threading
from functools import partial

import pytest
import trio

from kvlease.errors import ConfigError, PromptError
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime import streams
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import open_engine
from tests.runtime.toy import FaultyCopier, answer, prompt_of, toy_config, toy_model

PARAMS = SamplingParams(max_tokens=4)


@pytest.mark.parametrize("stop", [-1, 64, 10**9])
async def test_a_stop_token_that_is_no_token_is_refused(stop: int) -> None:
    """It would break the step of everybody in the batch, or ban a token nobody named."""
    params = SamplingParams(max_tokens=4, min_tokens=2, stop_tokens=frozenset({stop}))
    async with open_engine(toy_model(), toy_config()) as engine:
        with pytest.raises(PromptError, match=f"stop token {stop}"):
            await answer(engine, [1, 2, 3], params)


async def test_a_prompt_of_odd_bytes_is_refused() -> None:
    """A bytearray is bytes to its caller; its length is checked as theirs."""
    async with open_engine(toy_model(), toy_config()) as engine:
        with pytest.raises(PromptError, match="int32"):
            await answer(engine, bytearray(b"abc"), PARAMS)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 1e300])
@pytest.mark.parametrize("name", ["load_timeout_s", "request_timeout_s"])
def test_a_wait_without_end_is_refused(name: str, seconds: float) -> None:
    """R9: an infinite time-out is no time-out, and no number for the log."""
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: seconds})  # type: ignore[arg-type]


async def test_a_users_own_error_is_not_buried_when_a_copy_never_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The block's error comes out as itself; the thread that was left behind is its note."""
    hasty = partial(streams.open_cpu_stream, close_timeout_s=0.2)
    monkeypatch.setattr(streams, "open_cpu_stream", hasty)
    go = threading.Event()

    def hang(order: CopyOrder) -> int | None:
        assert go.wait(60)
        return None

    ports = EnginePorts(copier=FaultyCopier(hang))
    try:
        with trio.fail_after(40), pytest.raises(ValueError, match="user") as raised:
            async with open_engine(toy_model(), toy_config(), ports=ports) as engine:
                await answer(engine, prompt_of(1, 60), PARAMS)
                raise ValueError("user")
        assert any("still running" in note for note in raised.value.__notes__)
    finally:
        go.set()
