"""The journal: turns what steps and transfers do into the log's events.

Each method is called by the code that makes the transition (R14). A transfer's calls come from
stream workers too; the log takes them from any thread, before any reader can see the transition.
"""

from collections.abc import Sequence
from typing import final

from kvlease.errors import kept_rule
from kvlease.pools.held import PlannedTransfer
from kvlease.pools.memory import Memory
from kvlease.protocols.event_base import EventSink, Opening
from kvlease.protocols.event_pages import LeaseWait
from kvlease.protocols.event_work import (
    Row,
    StepDiscarded,
    StepDone,
    StepRead,
    TransferDone,
    TransferFail,
    TransferLate,
    TransferLayerDone,
    TransferPlan,
    TransferRecord,
    TransferRevoke,
)
from kvlease.protocols.ports import SampledToken
from kvlease.protocols.readiness import PendingTransfer
from kvlease.runtime.counters import Counters
from kvlease.runtime.messages import StepKind, StepOrder
from kvlease.runtime.stalls import StallBook
from kvlease.runtime.transfer import Transfer
from kvlease.units import LayerId, LeaseId, StepId, TransferId

_LOADER = "loader"
"""Stream workers make the loader's transitions; the log names the actor they work for."""


@final
class TransferJournal:
    """Writes the events of transfers; implements `transfer_plan.TransferObserver`."""

    def __init__(
        self, sink: EventSink, memory: Memory, planned: dict[TransferId, PlannedTransfer]
    ) -> None:
        """Borrows the log, the books (for page generations) and the engine's planned transfers."""
        self._sink = sink
        self._memory = memory
        self._planned = planned

    def planned(self, transfer: Transfer) -> None:
        """The transfer exists, with both ends held."""
        if not self._sink.audit:
            return
        plan, planned = transfer.plan, self._planned[transfer.plan.id]
        memory = self._memory
        is_load = plan.kind == "load"
        source, target = (memory.host, memory.device) if is_load else (memory.device, memory.host)
        parts = [part for order in plan.copies for part in order.parts]
        self._sink.emit(
            TransferPlan(
                actor=_LOADER,
                transfer=plan.id,
                direction="load" if is_load else "store",
                source_tier="host" if is_load else "device",
                source=source.runs(planned.source),
                source_lease=planned.source_lease,
                destination_tier="device" if is_load else "host",
                destination=target.runs(planned.destination),
                destination_lease=planned.destination_lease,
                tails=len(planned.tails),
                reader=planned.reader or 0,
                request=planned.request,
                layers=plan.layers,
                components=sorted({part.component for part in parts}),
                nbytes=plan.nbytes,
                deadline_ns=transfer.deadline_ns,
                owner=plan.owner,
            )
        )

    def recorded(self, transfer: Transfer, layers: tuple[int, int]) -> None:
        """Readers may order a stream behind these layers from now on."""
        if self._sink.audit:
            self._sink.emit(TransferRecord(actor=_LOADER, transfer=transfer.plan.id, layers=layers))

    def layer_done(self, transfer: Transfer, layers: tuple[int, int], nbytes: int) -> None:
        """All components of the layers have arrived; told for loads, `done` tells the rest."""
        if self._sink.audit and transfer.plan.kind == "load":
            self._sink.emit(
                TransferLayerDone(
                    actor=_LOADER, transfer=transfer.plan.id, layers=layers, nbytes=nbytes
                )
            )

    def done(self, transfer: Transfer, nbytes: int) -> None:
        """Everything planned has arrived."""
        if self._sink.audit:
            self._sink.emit(TransferDone(actor=_LOADER, transfer=transfer.plan.id, nbytes=nbytes))

    def failed(self, transfer: Transfer, reason: str, message: str) -> None:
        """The transfer ended without all its bytes."""
        if not self._sink.normal:
            return
        plan = transfer.plan
        if reason == "late":
            self._sink.emit(TransferLate(actor=_LOADER, transfer=plan.id, owner=plan.owner))
        elif reason == "revoked":
            self._sink.emit(TransferRevoke(actor=_LOADER, transfer=plan.id, reason=message))
        else:
            self._sink.emit(
                TransferFail(actor=_LOADER, transfer=plan.id, reason=f"{reason}: {message}")
            )

    def settled(self, transfer: Transfer) -> None:
        """Both ends are let go; their lease.close events are written by the pools."""


@final
class GateJournal:
    """Counts and writes the waits that readers really did; implements `GateObserver`."""

    def __init__(self, sink: EventSink, counters: Counters) -> None:
        """Borrows the log and the counters."""
        self._sink = sink
        self._counters = counters

    def waited(
        self, leases: Sequence[LeaseId], step: StepId, layer: LayerId, transfer: PendingTransfer
    ) -> None:
        """Readers were made to wait for one layer of a transfer."""
        self._counters.gate_waits += 1
        if self._sink.audit:
            assert isinstance(transfer, Transfer), "the engine starts no other"
            self._sink.emit(
                LeaseWait(
                    leases=list(leases),
                    step=step,
                    layer=layer,
                    components=transfer.missing(layer),
                    transfer=transfer.plan.id,
                    owner=transfer.plan.owner,
                    deadline_ns=transfer.deadline_ns,
                )
            )


@final
class StepJournal:
    """Writes what steps read and published.

    Most decode steps read what the one before them read: the same leases, every layer ready. Such
    a step names the earlier ``step.read`` instead of writing one of its own.
    """

    def __init__(self, sink: EventSink, stalls: StallBook) -> None:
        """Borrows the log, and the book of how long compute stood still."""
        self._sink = sink
        self._stalls = stalls
        self._last: dict[StepKind, tuple[list[LeaseId], int]] = {}

    def step_done(
        self,
        order: StepOrder,
        tokens: tuple[tuple[SampledToken, ...], ...],
        published: list[int],
    ) -> None:
        """Write a verified step: what it read, and per member how many tokens were handed over."""
        if not self._sink.audit:
            return
        rows = [
            Row(
                seq.request.id,
                seq.require_held().lease.id,
                part.start,
                len(part.tokens) + max(0, len(drawn) - 1),
                count,
            )
            for seq, part, drawn, count in zip(
                order.members, order.inputs.sequences, tokens, published, strict=True
            )
        ]
        read = self._read(order)
        self._sink.emit(StepDone(step=order.inputs.step, read=read, rows=rows, kind=order.phase))

    def step_discarded(self, order: StepOrder, error: Exception | None) -> None:
        """Write that a step publishes nothing, and why."""
        if self._sink.normal:
            read = self._read(order) if self._sink.audit else 0
            reason = "cancelled" if error is None else str(error)
            lost = {a.id for s in order.members for a in s.require_held().arrivals if a.is_lost}
            self._sink.emit(
                StepDiscarded(
                    step=order.inputs.step,
                    read=read,
                    reason=reason,
                    transfers=sorted(lost),
                    rule="" if error is None else kept_rule(error),
                )
            )

    def _read(self, order: StepOrder) -> int:
        """Return the step whose ``step.read`` says what this one opened, writing it if needed."""
        step, leases = order.inputs.step, [seq.require_held().lease.id for seq in order.members]
        if order.lease.was_ready:
            last = self._last.get(order.phase)
            if last is not None and last[0] == leases:
                return last[1]
            self._last[order.phase] = leases, step
        else:
            self._last.pop(order.phase, None)
        opens = [
            Opening(lease, first, count, after)
            for lease in leases
            for first, count, after in order.lease.openings.runs
        ]
        stalls = self._stalls.take(order.lease.pending)
        self._sink.emit(StepRead(step=step, opens=opens, stalls=stalls))
        return step
