"""What a log recorded of a run: who asked what and when, how long things took, what came out.

Enough to run it again: arrivals with their prompts, the times at which copies and steps were over,
and the answers to compare with. Needs a log that was written with ``log_prompts``.
"""

from __future__ import annotations

from typing import final

from attrs import define, field, frozen

from kvlease.errors import BadInput
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import (
    ActorStop,
    Event,
    LeaseClose,
    LogGap,
    LogOpen,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestSubmitted,
    StepDiscarded,
    StepDone,
    TransferFail,
    TransferLayerDone,
    TransferPlan,
)
from kvlease.services.replay.reader import BrokenLine, UnknownEvent, open_log


@frozen
class Arrival:
    """One request as it came."""

    at_ns: int
    request: int
    prompt: bytes
    params: SamplingParams


@final
@define
class Recording:
    """One log, read for running it again; times are the log's nanoseconds.

    Attributes:
        arrivals: in the order of the log.
        left_ns: when callers called their requests off.
        answers: hash of each answer that came to its end.
        steps_ns: when each step was over.
        layers_ns: when each (transfer, layer) was done.
        settled_ns: when no copy of a transfer touched memory any more.
        failed: reasons of transfers that failed.
        closing_ns: when the engine began to close; None if the log does not say.
    """

    head: LogOpen
    events: list[Event] = field(factory=list[Event])
    arrivals: list[Arrival] = field(factory=list[Arrival])
    left_ns: dict[int, int] = field(factory=dict[int, int])
    answers: dict[int, str] = field(factory=dict[int, str])
    steps_ns: dict[int, int] = field(factory=dict[int, int])
    layers_ns: dict[tuple[int, int], int] = field(factory=dict[tuple[int, int], int])
    settled_ns: dict[int, int] = field(factory=dict[int, int])
    failed: dict[int, str] = field(factory=dict[int, str])
    closing_ns: int | None = None
    _by_lease: dict[int, int] = field(factory=dict[int, int])

    def _hear(self, event: Event) -> None:
        """Take what is needed of one event."""
        match event:
            case RequestSubmitted():
                if not event.prompt or event.params is None:
                    raise BadInput(
                        "the log has no prompts, so nothing can be asked again; write it with"
                        " prompts (log_prompts, --log-prompts)"
                    )
                self.arrivals.append(Arrival(event.t_ns, event.request, event.prompt, event.params))
            case RequestCancelled():
                self.left_ns[event.request] = event.t_ns
            case RequestFinished():
                self.answers[event.request] = event.answer
            case RequestFailed():
                self.answers[event.request] = "failed"
            case StepDone() | StepDiscarded():
                self.steps_ns[event.step] = event.t_ns
            case TransferPlan():
                self._by_lease[event.destination_lease] = event.transfer
            case TransferLayerDone():
                first, count = event.layers
                for layer in range(first, first + count):
                    self.layers_ns[event.transfer, layer] = event.t_ns
            case TransferFail():
                self.failed[event.transfer] = event.reason
            case LeaseClose():
                transfer = self._by_lease.pop(event.lease, None)
                if transfer is not None:
                    self.settled_ns[transfer] = event.t_ns
            case ActorStop():
                if self.closing_ns is None:
                    self.closing_ns = event.t_ns
            case _:
                pass


def read_recording(path: str) -> Recording:
    """Read a whole log for running it again.

    Raises:
        BadInput: it cannot be read, is none, lost events, or has no prompts or configuration.
    """
    recording: Recording | None = None
    with open_log(path) as log:
        for line, events in log.blocks():
            for number, event in enumerate(events, line):
                if recording is None and isinstance(event, LogOpen):
                    recording = Recording(event)
                if event.seq != number or isinstance(event, LogGap | BrokenLine | UnknownEvent):
                    raise BadInput(
                        f"line {number} of {path} cannot be run again: events were lost or are out"
                        " of order there, or are of a kind that this version does not know"
                    )
                assert recording is not None, "the reader checks that the head comes first"
                recording.events.append(event)
                recording._hear(event)
    assert recording is not None, "the reader refuses an empty log"
    if recording.head.config is None:
        raise BadInput(f"{path} does not say how its engine was opened, so it cannot be run again")
    return recording
