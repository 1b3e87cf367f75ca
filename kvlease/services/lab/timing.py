"""How long things take on a simulated device: as its spec says, or as a log recorded it."""

from __future__ import annotations

from typing import Protocol, final

import trio

from kvlease.runtime.transfer import Transfer
from kvlease.services.lab.recording import Recording
from kvlease.services.lab.spec import DeviceSpec
from kvlease.units import StepId


class Timing(Protocol):
    """Seconds from now until a piece of work is over, asked when it begins."""

    def copies_s(self, transfer: Transfer, layer: int, nbytes: int) -> float:
        """Return what a group of copies, the last of them of ``layer``, takes on its link.

        ``nbytes`` cross the link; copies within the device do not count.
        """
        ...

    def step_s(self, step: StepId, num_tokens: int) -> float:
        """Return what a step takes if nothing holds it up."""
        ...


@final
class SpecTiming:
    """By the parameters of the device."""

    def __init__(self, spec: DeviceSpec) -> None:
        """Take the parameters."""
        self._spec = spec

    def copies_s(self, transfer: Transfer, layer: int, nbytes: int) -> float:
        """Latency, and bytes by the bandwidth of their direction; nothing for no bytes."""
        link = self._spec.load if transfer.plan.kind == "load" else self._spec.store
        return link.seconds(nbytes) if nbytes else 0.0

    def step_s(self, step: StepId, num_tokens: int) -> float:
        """So much a step, and so much a token."""
        return self._spec.step_seconds(num_tokens)


@final
class RecordedTiming:
    """Until the time at which the recorded run had it; by the spec where it had no such thing."""

    def __init__(self, recording: Recording, spec: DeviceSpec) -> None:
        """Borrow the recording; its first line is time 0."""
        self._recording = recording
        self._spec = SpecTiming(spec)
        self._began_ns = recording.head.t_ns

    def _until(self, at_ns: int | None) -> float | None:
        if at_ns is None:
            return None
        return max(0.0, (at_ns - self._began_ns) / 1e9 - trio.current_time())

    def copies_s(self, transfer: Transfer, layer: int, nbytes: int) -> float:
        """Until the layer was done, or until the transfer had settled if it never was."""
        number, recording = transfer.plan.id, self._recording
        at_ns = recording.layers_ns.get((number, layer), recording.settled_ns.get(number))
        until = self._until(at_ns)
        return self._spec.copies_s(transfer, layer, nbytes) if until is None else until

    def step_s(self, step: StepId, num_tokens: int) -> float:
        """Until the step was over."""
        until = self._until(self._recording.steps_ns.get(step))
        return self._spec.step_s(step, num_tokens) if until is None else until
