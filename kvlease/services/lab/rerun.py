"""Running a log again: the recorded arrivals on a simulated device, and what comes out differently.

A log of the lab says what device and what faults it ran on, so the run is repeated event for event.
A log of a real machine has none of that; then copies and steps end at the times recorded, and as
two threads' order is not the same twice, each actor's events are compared by themselves.
"""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import cast

import msgspec
import trio
from attrs import frozen

from kvlease.errors import BadInput, KVLeaseError
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.events import Event, LogClose, LogOpen, RequestFailed, RequestFinished
from kvlease.protocols.identity import CacheIdentity
from kvlease.protocols.ports import ModelRunner
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.models import load
from kvlease.services.lab.device import SimulatedDevice, virtual_log
from kvlease.services.lab.faults import FaultPlan
from kvlease.services.lab.recording import Arrival, Recording, read_recording
from kvlease.services.lab.schedule import run_in_order
from kvlease.services.lab.spec import DeviceSpec
from kvlease.services.lab.timing import RecordedTiming
from kvlease.services.replay.verdict import Difference, RerunReport

_VOLATILE = frozenset(
    {"seq", "t_ns", "deadline_ns", "stalls", "ttft_us", "load_us", "recompute_us", "decision"}
)
"""Fields that hold times, or a decision made from measured ones."""


@frozen
class _Setup:
    """What a recording says the run needs."""

    model: ModelRunner
    config: EngineConfig
    spec: DeviceSpec
    faults: FaultPlan
    is_exact: bool


def rerun(path: str, model: Path | ModelRunner | None = None) -> RerunReport:
    """Run a log again and compare; ``model`` is a checkpoint, None the embedded one.

    Takes as long as its arithmetic does. Raises BadInput when the log cannot be run again here.
    """
    recording = read_recording(path)
    setup = _set_up(recording, model)
    numbers: dict[int, int] = {}
    again = _run(recording, setup, numbers)
    answers = {
        event.request: event.answer if isinstance(event, RequestFinished) else "failed"
        for event in again
        if isinstance(event, RequestFinished | RequestFailed)
    }
    different = [
        request
        for request, answer in recording.answers.items()
        if answers.get(numbers.get(request, 0)) != answer
    ]
    compare = _first_in_order if setup.is_exact else _first_by_actor
    return RerunReport(
        answers=len(recording.answers),
        same_answers=len(recording.answers) - len(different),
        different=sorted(different),
        first_difference=compare(recording.events, again),
        is_exact=setup.is_exact,
    )


def _set_up(recording: Recording, model: Path | ModelRunner | None) -> _Setup:
    head, config = recording.head, recording.head.config
    assert config is not None, "read_recording refuses a log without"
    loaded = load(model, config)
    runner = loaded.runner
    identity = CacheIdentity(runner.fingerprint, runner.schema.digest)
    if identity.root().hex() != head.identity:
        raise BadInput(
            f"the log was written with {head.model}, and {loaded.name} has other weights or"
            " formats; give the same checkpoint with --model (a tenant's salt cannot be run again)"
        )
    spec, faults = DeviceSpec(), FaultPlan()
    if head.ports is not None:
        try:
            spec = msgspec.convert(head.ports.get("device"), DeviceSpec)
            faults = msgspec.convert(head.ports.get("faults"), FaultPlan)
        except msgspec.ValidationError as error:
            raise BadInput(
                f"what stood behind the log's ports is not known here: {error}"
            ) from error
    return _Setup(runner, config, spec, faults, head.ports is not None)


def _run(recording: Recording, setup: _Setup, numbers: dict[int, int]) -> list[Event]:
    """Return the events of the run; ``numbers`` gets what it calls each recorded request."""
    events: list[Event] = []

    async def main() -> None:
        log = virtual_log(io.BytesIO())
        log.subscribe(events.append)
        timing = None if setup.is_exact else RecordedTiming(recording, setup.spec)
        device = SimulatedDevice(setup.model, setup.spec, log, setup.faults, timing)
        async with open_engine(device.runner, setup.config, log=log, ports=device.ports) as engine:
            await _serve(engine, recording, numbers)
        log.close()

    run_in_order(main)
    return events


async def _serve(engine: Engine, recording: Recording, numbers: dict[int, int]) -> None:
    """Ask what was asked, when it was asked, and stay until the engine was closed."""
    offset = 0.0 if recording.head.ports is not None else recording.head.t_ns / 1e9

    async def ask(arrival: Arrival) -> None:
        left_ns = recording.left_ns.get(arrival.request)
        deadline = trio.current_time() + 1e9 if left_ns is None else left_ns / 1e9 - offset
        with trio.CancelScope(deadline=deadline):
            try:
                async with engine.generate(arrival.prompt, arrival.params) as stream:
                    numbers[arrival.request] = stream.request.id
                    await stream.drain()
            except KVLeaseError:
                pass  # its end is in the log, to be compared

    async with trio.open_nursery() as nursery:
        for arrival in recording.arrivals:
            at_s = arrival.at_ns / 1e9 - offset
            if at_s > trio.current_time():  # what came in one burst comes in one again
                await trio.sleep_until(at_s)
            nursery.start_soon(ask, arrival)
    if recording.closing_ns is not None:
        await trio.sleep_until(recording.closing_ns / 1e9 - offset)


def _first_in_order(recorded: list[Event], again: list[Event]) -> Difference | None:
    """Compare event by event; a recording that broke off says nothing of what came after it."""
    for line, (event, other) in enumerate(zip(recorded, again, strict=False), 1):
        if _text(event) != _text(other):
            return _difference(line, event, other)
    line = min(len(recorded), len(again))
    if len(again) < len(recorded):
        return _difference(line + 1, recorded[line], None)
    if len(again) > len(recorded) and isinstance(recorded[-1], LogClose):
        return _difference(line + 1, None, again[line])
    return None


def _first_by_actor(recorded: list[Event], again: list[Event]) -> Difference | None:
    """Compare each actor's events in their order, times left out; return the earliest line."""
    theirs: defaultdict[str, list[Event]] = defaultdict(list)
    for event in again:
        theirs[event.actor].append(event)
    taken: defaultdict[str, int] = defaultdict(int)
    for line, event in enumerate(recorded, 1):
        if isinstance(event, LogOpen):
            taken[event.actor] += 1
            continue
        mine, number = theirs[event.actor], taken[event.actor]
        taken[event.actor] += 1
        other = mine[number] if number < len(mine) else None
        if other is None or _lasting(event) != _lasting(other):
            return _difference(line, event, other)
    return None


def _text(event: Event) -> bytes:
    if isinstance(event, LogOpen):
        fields = cast("dict[str, object]", msgspec.to_builtins(event))
        return msgspec.json.encode({**fields, "started_at": "", "model": ""})
    return msgspec.json.encode(event)


def _lasting(event: Event) -> dict[str, object]:
    """What of an event does not depend on when it happened."""
    fields = cast("dict[str, object]", msgspec.to_builtins(event))
    kept = {name: value for name, value in fields.items() if name not in _VOLATILE}
    if "opens" in kept:
        kept["opens"] = [run[:3] for run in cast("list[list[int]]", kept["opens"])]
    return kept


def _difference(line: int, event: Event | None, other: Event | None) -> Difference:
    texts = ["nothing" if e is None else msgspec.json.encode(e).decode() for e in (event, other)]
    return Difference(line, *texts)
