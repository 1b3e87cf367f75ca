"""Rules about transfers: both ends held, whole bundles, record before done (R2, R5, R6, R7, R8)."""

import heapq
from typing import final

from kvlease.protocols.events import (
    LayerRun,
    TransferDone,
    TransferFail,
    TransferLanded,
    TransferLate,
    TransferLayerDone,
    TransferPlan,
    TransferRecord,
    TransferRevoke,
)
from kvlease.services.replay.head import Bundle
from kvlease.services.replay.opening_rules import OpeningRules, depend
from kvlease.services.replay.pages import NO_RUNS
from kvlease.services.replay.state import GRACE_NS, Landing, TransferState, World
from kvlease.services.replay.transfer_ends import TransferEnds

NUM_SLOWEST = 10
"""How many of the slowest transfers are told."""
EVERY = -1
"""Stands for the run of all layers among those of one."""


@final
class TransferRules:
    """Follows ``transfer.*``; one method an event.

    ``slowest`` is a heap of (nanoseconds, line of its end, transfer): no two end on one line, while
    a log that is wrong may give two of them one number.
    """

    def __init__(self, world: World, openings: OpeningRules) -> None:
        """Share the world."""
        self._world = world
        self._openings = openings
        self._findings = world.findings
        self._both = TransferEnds(world)
        self._ends = world.ends
        self._reserved = world.reserved
        self._sequences = world.sequences
        self._transfers = world.transfers
        self._bundles = world.head.bundles
        self._num_layers = world.head.num_layers
        self._every_layer = world.head.every_layer
        self._all_layers = 0, world.head.num_layers
        self._usual_runs: dict[LayerRun, int] = {
            self._all_layers: EVERY,
            **{(layer, 1): layer for layer in range(world.head.num_layers)},
        }
        self.slowest: list[tuple[int, int, TransferState]] = []
        self._least_ns = 0  # what a transfer has to take to be one of them

    def plan(self, event: TransferPlan) -> None:
        """A movement is planned, with both its ends held (R7), of whole bundles (R5)."""
        number, seq = event.transfer, event.seq
        transfer = self._transfers.get(number)
        if transfer is None:
            transfer = self._transfers[number] = TransferState(number)
        elif transfer.planned:
            what = f"transfer {number} was planned twice"
            self._findings.violate("R14", what, (transfer.planned, seq), transfer=number)
        transfer.plan, transfer.planned = event, seq
        transfer.recorded = [0] * self._num_layers
        transfer.done = [0] * self._num_layers
        source = self._ends.get(event.source_lease)
        target = self._ends.get(event.destination_lease)
        # An end that is as it should be names the very runs that its lease was opened with.
        are_known = True
        if (
            source is None
            or source.mode != "shared"
            or source.transfer != number
            or source.tier != event.source_tier
            or source.pages != event.source
        ):
            are_known = False
            self._both.check(event, event.source_lease, event.source, event.source_tier, "source")
        if (
            target is None
            or target.mode != "exclusive"
            or target.transfer != number
            or target.tier != event.destination_tier
            or self._reserved.get(event.destination_lease, NO_RUNS) != event.destination
        ):
            are_known = False
            lease, runs = event.destination_lease, event.destination
            self._both.check(event, lease, runs, event.destination_tier, "destination")
        if event.source or event.destination:
            transfer.num_pages = self._both.hand_on(event, are_known=are_known)
        self._whole(event, transfer)
        if event.reader:
            self._tail(event, transfer)

    def _whole(self, event: TransferPlan, transfer: TransferState) -> None:
        """Check that every component moves, with the bytes that the head's come to (R5)."""
        transfer.num_tails = event.tails
        bundle = self._bundles[(transfer.num_pages > 0) + 2 * (event.tails > 0)]
        transfer.bundle = bundle
        if self._world.keeps_landings:
            transfer.landing = Landing(bundle.num_parts)
        names = event.components
        if names != bundle.names and sorted(names) != bundle.names:
            missing, more = set(bundle.names) - set(names), set(names) - set(bundle.names)
            what = f"transfer {event.transfer} leaves out {', '.join(sorted(missing))}"
            if not missing:
                what = (
                    f"transfer {event.transfer} moves unknown {', '.join(sorted(more)) or 'twins'}"
                )
            component = min(missing, default=None)
            self._findings.violate(
                "R5", what, (event.seq,), transfer=event.transfer, request=event.request,
                component=component,
            )  # fmt: skip
        if event.layers != self._all_layers:
            self._some_layers(event, transfer, bundle)
        nbytes = transfer.num_pages * bundle.all_spans + event.tails * bundle.all_tails
        if event.nbytes != nbytes:
            what = (
                f"transfer {event.transfer} of {transfer.num_pages} pages and {event.tails} tails "
                f"plans {event.nbytes} bytes, and the head's components come to {nbytes}"
            )
            self._findings.violate(
                "R5", what, (event.seq,), transfer=event.transfer, request=event.request
            )

    def _some_layers(self, event: TransferPlan, transfer: TransferState, bundle: Bundle) -> None:
        """Not all layers are planned: these have to be there, and to be all that have bytes."""
        first, count = event.layers
        end = first + count
        if not 0 <= first < end <= self._num_layers:
            self._no_layers(transfer, first, count, "was planned for", seq=event.seq)
        if first > bundle.first_layer or end < bundle.end_layer:
            what = f"transfer {event.transfer} leaves out layers of its pages"
            self._findings.violate("R5", what, (event.seq,), transfer=event.transfer)

    def _tail(self, event: TransferPlan, transfer: TransferState) -> None:
        lease = self._sequences.get(event.reader)
        if lease is not None:
            depend(lease, transfer, event.seq)
            lease.tail = transfer
        elif not self._world.is_lossy:
            what = (
                f"transfer {transfer.id} fills the state of lease {event.reader}, which is not open"
            )
            self._both.not_held(event, event.reader, what, 0)

    def _unplanned(self, number: int, seq: int, doing: str) -> None:
        if not self._world.is_lossy:
            what = f"transfer {number} {doing}, and no plan of it is open"
            self._findings.violate("R14", what, (seq,), transfer=number)

    def record(self, event: TransferRecord) -> None:
        """Readers may be ordered behind these layers from now on."""
        try:  # as a rule it is one layer, or all of them
            transfer, layer = self._transfers[event.transfer], self._usual_runs[event.layers]
        except KeyError:
            self._record(event)
            return
        if not transfer.planned or event.components:
            self._record(event)
        elif layer == EVERY:
            transfer.recorded = [event.seq] * self._num_layers
        else:
            transfer.recorded[layer] = event.seq

    def _record(self, event: TransferRecord) -> None:
        """Take layers that are told in parts or in runs, or that may not be as they should be."""
        seq, transfer = event.seq, self._transfers.get(event.transfer)
        if transfer is None or not transfer.planned:
            self._unplanned(event.transfer, seq, "was recorded")
            return
        first, count = event.layers
        if not 0 <= first < first + count <= self._num_layers:
            self._no_layers(transfer, first, count, "recorded", seq)
        for layer in range(max(0, first), min(first + count, self._num_layers)):
            if not event.components or self._all(transfer, layer, event.components, "record"):
                transfer.recorded[layer] = seq

    def _no_layers(
        self, transfer: TransferState, first: int, count: int, doing: str, seq: int
    ) -> None:
        what = (
            f"transfer {transfer.id} {doing} layers {first} to {first + count - 1}, and the model "
            f"has {self._num_layers}"
        )
        seqs = (transfer.planned, seq)
        self._findings.violate("R14", what, seqs, transfer=transfer.id, request=transfer.request)

    def _all(self, transfer: TransferState, layer: int, names: list[str], what: str) -> bool:
        """Whether a layer that is told in parts is complete now."""
        if transfer.partial is None:
            transfer.partial = {}
        bundle = transfer.bundle
        assert bundle is not None, "a planned transfer has one"
        left = transfer.partial.setdefault((what, layer), set(bundle.layer_names[layer]))
        left.difference_update(names)
        return not left

    def layer_done(self, event: TransferLayerDone) -> None:
        """The bytes of these layers are true, the completion says."""
        transfer = self._transfers.get(event.transfer)
        if transfer is None or (bundle := transfer.bundle) is None or event.components:
            self._layers_done(event)
            return
        try:  # as a rule it is one layer that has bytes to move
            layer = bundle.one_layer[event.layers]
        except KeyError:
            self._layers_done(event)
            return
        planned = transfer.num_pages * bundle.span_nbytes[layer]
        if transfer.num_tails:
            planned += transfer.num_tails * bundle.tail_nbytes[layer]
        transfer.done[layer] = transfer.latest = event.seq
        transfer.done_mask |= 1 << layer
        if not transfer.recorded[layer]:
            self._unrecorded(transfer, layer, event.seq)
        if event.nbytes != planned:
            self._other(transfer, layer, event.nbytes, planned, event.seq)

    def _layers_done(self, event: TransferLayerDone) -> None:
        """Take layers that are told in parts or in runs, or that may not be as they should be."""
        seq, transfer = event.seq, self._transfers.get(event.transfer)
        if transfer is None or not transfer.planned:
            self._unplanned(event.transfer, seq, "had layers done")
            return
        bundle = transfer.bundle
        assert bundle is not None, "a planned transfer has one"
        (first, count), components = event.layers, event.components
        num_layers, planned = self._num_layers, 0
        if not 0 <= first < first + count <= num_layers:
            self._no_layers(transfer, first, count, "was done with", seq)
        for layer in range(max(0, first), min(first + count, num_layers)):
            if not bundle.layer_mask >> layer & 1 or (
                components and not self._all(transfer, layer, components, "done")
            ):
                continue
            planned += transfer.num_pages * bundle.span_nbytes[layer]
            planned += transfer.num_tails * bundle.tail_nbytes[layer]
            transfer.done[layer] = transfer.latest = seq
            transfer.done_mask |= 1 << layer
            if not transfer.recorded[layer]:
                self._unrecorded(transfer, layer, seq)
        if event.nbytes != planned and not components:
            self._other(transfer, first, event.nbytes, planned, seq)

    def _unrecorded(self, transfer: TransferState, layer: int, seq: int) -> None:
        what = f"layer {layer} of transfer {transfer.id} was done before it was recorded"
        self._findings.violate(
            "R2", what, (transfer.planned, seq), transfer=transfer.id, layer=layer,
            request=transfer.request,
        )  # fmt: skip

    def _other(
        self, transfer: TransferState, layer: int | None, nbytes: int, planned: int, seq: int
    ) -> None:
        where = "" if layer is None else f" of layer {layer}"
        what = f"transfer {transfer.id} was done with {nbytes} bytes{where} of {planned} planned"
        self._findings.violate(
            "R5", what, (transfer.planned, seq), transfer=transfer.id, layer=layer,
            request=transfer.request,
        )  # fmt: skip

    def done(self, event: TransferDone) -> None:
        """Everything planned is true, the completion says."""
        seq, transfer = event.seq, self._transfers.get(event.transfer)
        if transfer is None or not transfer.planned:
            self._unplanned(event.transfer, seq, "was done")
            return
        bundle, plan = transfer.bundle, transfer.plan
        assert bundle is not None, "a planned transfer has one"
        assert plan is not None
        if event.nbytes != plan.nbytes:
            self._other(transfer, None, event.nbytes, plan.nbytes, seq)
        if transfer.done_mask != bundle.layer_mask:
            if plan.direction == "load":
                self._untold(transfer, bundle.layer_mask & ~transfer.done_mask, seq)
            self._rest_done(transfer, bundle.layer_mask, seq)
        self._end_of(transfer, plan, "done", seq, event.t_ns)

    def _untold(self, transfer: TransferState, missing: int, seq: int) -> None:
        """A load is told layer by layer, for those who read it: done is done with all of them."""
        for layer in range(self._num_layers):
            if missing >> layer & 1:
                what = f"load {transfer.id} was done, and its layer {layer} was not"
                self._findings.violate(
                    "R14", what, (transfer.planned, transfer.recorded[layer], seq),
                    transfer=transfer.id, layer=layer, request=transfer.request,
                )  # fmt: skip

    def _rest_done(self, transfer: TransferState, mask: int, seq: int) -> None:
        """Take the layers in ``mask`` as done that nothing was told of."""
        if not transfer.done_mask and mask == self._every_layer and 0 not in transfer.recorded:
            transfer.done = [seq] * self._num_layers  # as a store goes: no layer was told apart
        else:
            for layer in range(self._num_layers):
                if mask >> layer & 1 and not transfer.done[layer]:
                    transfer.done[layer] = seq
                    if not transfer.recorded[layer]:
                        self._unrecorded(transfer, layer, seq)
        transfer.done_mask = mask

    def fail(self, event: TransferFail) -> None:
        """It ends without all its bytes."""
        self._ended(event, "failed")

    def revoke(self, event: TransferRevoke) -> None:
        """It is called off."""
        self._ended(event, "revoked")

    def late(self, event: TransferLate) -> None:
        """Its deadline passed."""
        self._ended(event, "late")

    def _ended(self, event: TransferFail | TransferRevoke | TransferLate, how: str) -> None:
        transfer = self._transfers.get(event.transfer)
        if transfer is None or transfer.plan is None:
            self._unplanned(event.transfer, event.seq, f"ended ({how})")
            return
        self._end_of(transfer, transfer.plan, how, event.seq, event.t_ns)

    def _end_of(
        self, transfer: TransferState, plan: TransferPlan, how: str, seq: int, t_ns: int
    ) -> None:
        if transfer.ended:
            what = f"transfer {transfer.id} ended twice: {transfer.ended}, {how}"
            self._findings.violate("R14", what, (transfer.end, seq), transfer=transfer.id)
            return
        transfer.ended = how
        transfer.end = transfer.latest = seq
        if plan.deadline_ns and t_ns > plan.deadline_ns + GRACE_NS:
            overdue_s = (t_ns - plan.deadline_ns) / 1e9
            self._findings.violate(
                "R9",
                f"transfer {transfer.id} ended {overdue_s:.1f} s after its deadline",
                (transfer.planned, seq), transfer=transfer.id, request=transfer.request,
            )  # fmt: skip
        took_ns = t_ns - plan.t_ns
        if took_ns >= self._least_ns:
            self._slow(transfer, took_ns)
        if plan.destination_lease not in self._ends:
            self._openings.dismiss(transfer)

    def _slow(self, transfer: TransferState, took_ns: int) -> None:
        """Keep one of the slowest so far."""
        slowest, took = self.slowest, (took_ns, transfer.end, transfer)
        if len(slowest) < NUM_SLOWEST:
            heapq.heappush(slowest, took)
        else:
            heapq.heappushpop(slowest, took)
        if len(slowest) == NUM_SLOWEST:
            self._least_ns = slowest[0][0]

    def landed(self, event: TransferLanded) -> None:
        """The bytes are really there: not after their room was given back (R6)."""
        world, seq, number = self._world, event.seq, event.transfer
        if not world.has_landings:
            self._first_landing()
        transfer = self._transfers.get(number) or world.limbo.get(number)
        if transfer is None or transfer.landing is None:
            if not world.is_lossy:
                what = f"bytes of transfer {number} landed, which is over and gave its pages back"
                self._findings.violate(
                    "R6", what, (seq,), transfer=number, layer=event.layer,
                    component=event.component,
                )  # fmt: skip
            return
        if transfer.closed:
            what = f"bytes of transfer {number} landed after its destination was let go"
            self._findings.violate(
                "R6", what, (transfer.planned, transfer.closed, seq), transfer=number,
                layer=event.layer, component=event.component, request=transfer.request,
            )  # fmt: skip
        part = event.layer, event.component
        bundle, landing = transfer.bundle, transfer.landing
        if bundle is None or not 0 <= event.layer < self._num_layers or part in landing.seqs:
            return
        landing.seqs[part] = transfer.latest = seq
        landing.left -= event.component in bundle.layer_names[event.layer]
        self._openings.landed(transfer, event.layer, event.component, seq)
        if not landing.left:
            world.limbo.pop(number, None)

    def _first_landing(self) -> None:
        """From now on it is known that this log tells when bytes land."""
        world = self._world
        world.has_landings = world.keeps_landings = True
        for transfer in self._transfers.values():
            if transfer.bundle is not None and transfer.landing is None:
                transfer.landing = Landing(transfer.bundle.num_parts)
