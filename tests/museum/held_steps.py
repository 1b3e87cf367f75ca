"""A model whose step stands still until the test lets it go, and other tools of time."""

import threading
import time
from collections.abc import Callable

import trio
from attrs import define, field

from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import ModelRunner, StepInput, StepResult, Stream
from kvlease.protocols.schema import Schema
from kvlease.runtime.engine import Engine
from tests.runtime.toy import toy_model


@define(eq=False)
class HeldSteps:
    """The toy model; steps that ``matches`` are launched behind a closure that waits for ``go``.

    The step has been planned and launched, the scheduler goes on; only its device work is late.
    """

    matches: Callable[[StepInput], bool]
    model: ModelRunner = field(factory=toy_model)
    reached: threading.Event = field(factory=threading.Event)
    go: threading.Event = field(factory=threading.Event)

    @property
    def schema(self) -> Schema:
        """As the model's."""
        return self.model.schema

    @property
    def vocab_size(self) -> int:
        """As the model's."""
        return self.model.vocab_size

    @property
    def max_positions(self) -> int:
        """As the model's."""
        return self.model.max_positions

    @property
    def eos_tokens(self) -> frozenset[int]:
        """As the model's."""
        return self.model.eos_tokens

    @property
    def fingerprint(self) -> str:
        """As the model's."""
        return self.model.fingerprint

    async def forward(self, inputs: StepInput, lease: StepLease, stream: Stream) -> StepResult:
        """Launch the step, behind the hold if it is one to hold."""
        if not self.go.is_set() and self.matches(inputs):
            stream.launch(self._stand)
        return await self.model.forward(inputs, lease, stream)

    def _stand(self) -> None:
        self.reached.set()
        assert self.go.wait(30), "nobody let the held step go"

    async def wait_reached(self) -> None:
        """Wait until a step stands."""
        assert await trio.to_thread.run_sync(self.reached.wait, 10)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; a busy machine may take its time."""
    for _ in range(2000):
        if holds():
            return
        await trio.sleep(0.005)
    raise AssertionError("it never came to hold")


async def all_stored(engine: Engine) -> None:
    """Wait, without asking for anything, until the engine has stored something and is done."""
    counters = engine._core.counters
    await until(lambda: counters.stores > 0 and not engine._core.transfers)


@define
class JumpingClock:
    """Real time, which the test can make jump ahead; a deadline then passes at once."""

    ahead_s: float = 0.0

    def now(self) -> float:
        """Return seconds since an arbitrary start."""
        return time.monotonic() + self.ahead_s
