"""A simulated device: one compute stream and two links, in virtual time, without threads.

Memory and arithmetic are real, but the time that they take is the spec's. A kernel reads at the
start of its time and is over at its end; a copy's bytes are there at the end of its own. So loads
really overlap with compute, layer by layer, and a read that comes too early really reads what was
there before. Under a mock clock and a fixed schedule two runs are the same, event for event.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import BinaryIO, TypeVar, cast, final

import msgspec
import trio
from attrs import frozen

from kvlease.protocols.event_base import current_actor
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import Completion, ModelRunner, StepInput, StepResult, Stream
from kvlease.protocols.schema import Schema
from kvlease.runtime.actor import Inbox
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.clock import TrioClock
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.stream_scope import WaitObserver, Work
from kvlease.runtime.streams import EngineStreams
from kvlease.services.lab.faults import FaultPlan, Injector
from kvlease.services.lab.inbox import FaultyInbox
from kvlease.services.lab.link import Link
from kvlease.services.lab.spec import DeviceSpec
from kvlease.services.lab.timing import SpecTiming, Timing
from kvlease.services.lab.truth import Truth
from kvlease.services.lab.virtual_stream import SimulatedStream, open_simulated_stream

M = TypeVar("M")


def virtual_log(file: BinaryIO | None = None) -> EventLog:
    """Return an audit log on the clock of the present Trio run, written without threads."""
    clock = TrioClock()
    return EventLog(
        file, flush_every_s=math.inf, clock_ns=lambda: round(clock.now() * 1e9), threads=False
    )


@final
class SimulatedDevice:
    """What an engine runs on in the lab: `ports` for its outside world, `runner` for its model.

    Make it inside the Trio run, for one engine.
    """

    def __init__(
        self,
        model: ModelRunner,
        spec: DeviceSpec | None = None,
        log: EventLog | None = None,
        faults: FaultPlan | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Take a model; the log, if any, is told of landings, and tells when pages change hands.

        ``timing`` says how long things take where that is not for the spec to say.
        """
        self.spec = spec or DeviceSpec()
        self.truth = Truth(model.schema, log)
        plan = faults or FaultPlan()
        self._injector = Injector(plan)
        self._timing = timing or SpecTiming(self.spec)
        self.runner: ModelRunner = _TimedModel(model, self._timing, self.truth, self._injector)
        self.ports = EnginePorts(
            clock=TrioClock(),
            streams=self._open_streams,
            inboxes=self._inbox,
            about={
                "device": cast("object", msgspec.to_builtins(self.spec)),
                "faults": cast("object", msgspec.to_builtins(plan)),
                "tells": ["transfer.landed", "step.ran"],
            },
            model_name=type(model).__name__,
        )
        if log is not None:
            log.subscribe(self.truth.watch)

    def _inbox(self, mailbox: Mailbox[M], /) -> Inbox[M]:
        return FaultyInbox(mailbox, self._injector)

    @asynccontextmanager
    async def _open_streams(self, observer: WaitObserver) -> AsyncGenerator[EngineStreams]:
        spec, truth, injector = self.spec, self.truth, self._injector
        turn = trio.Lock()
        other = turn if spec.shares_link else trio.Lock()
        load = Link("load", self._timing, turn, truth, injector)
        store = Link("store", self._timing, other, truth, injector)
        compute = SimulatedStream("compute", _compute, holds=truth.holds, observer=observer)
        try:
            async with (
                open_simulated_stream(compute),
                open_simulated_stream(load.stream),
                open_simulated_stream(store.stream),
            ):
                yield EngineStreams(compute, load.stream, store.stream)
        finally:
            load.close()
            store.close()
            truth.close()


async def _compute(work: Work) -> None:
    work()
    if isinstance(work, _TimedWork):
        await trio.sleep(work.seconds)


@frozen
class _TimedWork:
    """A kernel: it reads at the start of its time."""

    work: Work
    seconds: float

    def __call__(self) -> None:
        self.work()


@final
class _TimedModel:
    """A model whose steps take the spec's time, and whose openings are told of."""

    def __init__(
        self, model: ModelRunner, timing: Timing, truth: Truth, injector: Injector
    ) -> None:
        self._model = model
        self._timing = timing
        self._truth = truth
        self._injector = injector

    @property
    def schema(self) -> Schema:
        return self._model.schema

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def max_positions(self) -> int:
        return self._model.max_positions

    @property
    def eos_tokens(self) -> frozenset[int]:
        return self._model.eos_tokens

    @property
    def fingerprint(self) -> str:
        return self._model.fingerprint

    async def forward(self, inputs: StepInput, lease: StepLease, stream: Stream) -> StepResult:
        self._injector.at_work(current_actor.get())
        tokens = sum(len(part.tokens) for part in inputs.sequences)
        layer_s = self._timing.step_s(inputs.step, tokens) / self.schema.num_layers
        timed = _StepScope(stream, inputs, lease, layer_s, self._truth)
        result = await self._model.forward(inputs, lease, timed)
        stream.launch(partial(self._truth.ran, inputs.step))
        return result


@final
class _StepScope:
    """The stream as one step sees it: what it launches behind an opening is that layer's kernel."""

    def __init__(
        self, stream: Stream, inputs: StepInput, lease: StepLease, layer_s: float, truth: Truth
    ) -> None:
        self._stream = stream
        self._inputs = inputs
        self._lease = lease
        self._layer_s = layer_s
        self._truth = truth
        self._num_opened = 0

    def launch(self, work: Work) -> None:
        opened = [
            layer
            for first, count, _ in self._lease.openings.runs
            for layer in range(first, first + count)
        ]
        new = opened[self._num_opened :]
        self._num_opened = len(opened)
        for layer in new:
            self._truth.opened(self._inputs.step, self._lease.members, layer)
        self._stream.launch(_TimedWork(work, self._layer_s * len(new)) if new else work)

    def wait(self, completion: Completion) -> None:
        self._stream.wait(completion)

    def record(self) -> Completion:
        return self._stream.record()

    def scope(self) -> Stream:
        return self._stream.scope()
