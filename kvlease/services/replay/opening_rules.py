"""Rules about openings: nothing is opened before it was recorded, nor read before it landed (R2).

Only leases that depend on a transfer come here. A gate lets an opening through once the layer is
recorded, and the reader's stream goes on once it is done: so an opening is let through at the
later of its own place in the log and the layer's ``transfer.layer_done``, and it came early if a
component landed only after that. Where landings are told, openings are kept until all have come.
"""

from typing import final

from kvlease.protocols.events import Opening
from kvlease.services.replay.state import (
    MAX_LIMBO,
    Landing,
    PendingOpening,
    SequenceState,
    TransferState,
    World,
)


def depend(lease: SequenceState, transfer: TransferState, seq: int) -> None:
    """A lease's bytes come by this transfer: what it opens is held against it."""
    if lease.depends is None:
        lease.depends = []
    if transfer not in lease.depends:
        lease.depends.append(transfer)
        transfer.readers += 1
        lease.is_plain = False
        lease.last = max(lease.last, seq)


@final
class OpeningRules:
    """Judges openings of leases that depend on transfers, and keeps those still in doubt."""

    def __init__(self, world: World) -> None:
        """Share the world."""
        self._world = world
        self._findings = world.findings

    def behind(self, opening: Opening, step: int, seq: int, lease: int = 0) -> None:
        """An opening came after the line that tells of it: what it hides cannot be known."""
        by = f"step {step}" if step else f"lease {lease}"
        what = f"{by} opened lease {opening.lease} after line {opening.after_seq}, not written yet"
        self._findings.violate("R14", what, (seq,), lease=opening.lease, step=step)

    def mask_of(self, opening: Opening, step: int, seq: int) -> int:
        """Return the layers opened, a bit each; none, and a violation, if the model has others."""
        first, count, known = opening.layer, opening.num_layers, self._world.head.num_layers
        if 0 <= first < first + count <= known:
            return ((1 << count) - 1) << first
        by = f"step {step}" if step else f"lease {opening.lease}"
        what = f"{by} opened layers {first} to {first + count - 1} of {known}"
        self._findings.violate("R1", what, (seq,), lease=opening.lease, step=step)
        return 0

    def check(self, lease: SequenceState, mask: int, after: int, step: int, seq: int) -> None:
        """Judge openings of the layers in ``mask``, none before ``after``, told at ``seq``."""
        assert lease.depends is not None
        doubtful: list[TransferState] = []
        for transfer in lease.depends:
            recorded = transfer.recorded  # empty before the plan
            # All recorded, and landings untold: no opening from `after` on can be early.
            is_recorded = recorded and 0 not in recorded and max(recorded) <= after
            if not is_recorded or transfer.landing is not None:
                doubtful.append(transfer)
        if doubtful:
            self._check(lease, doubtful, mask, after, step, seq)

    def check_done(self, lease: SequenceState, mask: int, after: int, seq: int) -> None:
        """Judge openings that no stream could make wait: behind what was done, and no other."""
        for transfer in lease.depends or ():
            mine = 0 if transfer.bundle is None else transfer.bundle.layer_mask & mask
            for layer in range(mine.bit_length()):
                if mine >> layer & 1 and not 0 < transfer.done[layer] <= after:
                    what = (
                        f"lease {lease.id} opened layer {layer} at once, and transfer "
                        f"{transfer.id} was not done with it"
                    )
                    self._findings.violate(
                        "R2", what, (transfer.planned, transfer.done[layer], seq),
                        request=lease.request, lease=lease.id, transfer=transfer.id, layer=layer,
                    )  # fmt: skip

    def _check(
        self,
        lease: SequenceState,
        transfers: list[TransferState],
        mask: int,
        after: int,
        step: int,
        seq: int,
    ) -> None:
        for transfer in transfers:
            if transfer.bundle is None:
                self._unrecorded(lease, transfer, None, step, seq)
        layer = 0
        while mask >> layer:
            if mask >> layer & 1:
                opening = PendingOpening(layer, lease, step, after, seq)
                for transfer in transfers:
                    if transfer.bundle is not None and transfer.bundle.layer_mask >> layer & 1:
                        self._against(transfer, lease, opening)
            layer += 1

    def _against(
        self, transfer: TransferState, lease: SequenceState, opening: PendingOpening
    ) -> None:
        layer = opening.layer
        recorded = transfer.recorded[layer]
        if not 0 < recorded <= opening.after:
            self._unrecorded(lease, transfer, layer, opening.step, opening.seq)
        if transfer.done[layer] and transfer.landing is not None:
            self._landed_late(transfer, transfer.landing, opening)

    def _unrecorded(
        self, lease: SequenceState, transfer: TransferState, layer: int | None, step: int, seq: int
    ) -> None:
        bundle = transfer.bundle
        if bundle is None or layer is None:
            names: list[str | None] = [None]
            recorded = 0
        else:
            missing = None if transfer.partial is None else transfer.partial.get(("record", layer))
            names = [*(missing or bundle.layer_names[layer])]
            recorded = transfer.recorded[layer]
        by = f"step {step}" if step else f"lease {lease.id}"
        for name in names:
            what = (
                f"{by} opened {name or 'pages'} of layer {layer} before transfer {transfer.id} "
                "had recorded them"
            )
            self._findings.violate(
                "R2", what, (transfer.planned, recorded, seq), request=lease.request,
                lease=lease.id, transfer=transfer.id, step=step, layer=layer, component=name,
            )  # fmt: skip

    def _landed_late(
        self, transfer: TransferState, landing: Landing, opening: PendingOpening
    ) -> None:
        """Count components of the layer that had landed only after the opening was let through."""
        assert transfer.bundle is not None
        layer = opening.layer
        let_through = max(opening.after, transfer.done[layer])
        for name in transfer.bundle.layer_names[layer]:
            landed = landing.seqs.get((layer, name), 0)
            if landed > let_through:
                self._early(transfer, opening, name, landed)
        if landing.left:
            landing.openings.append(opening)

    def landed(self, transfer: TransferState, layer: int, name: str, seq: int) -> None:
        """A component's bytes are there now: openings let through before came early."""
        done, landing = transfer.done[layer], transfer.landing
        assert landing is not None
        if done:
            what = (
                f"transfer {transfer.id} said that {name} of layer {layer} was done before its "
                "bytes had landed"
            )
            self._findings.violate(
                "R2", what, (transfer.planned, transfer.recorded[layer], done, seq),
                request=transfer.request, transfer=transfer.id, layer=layer, component=name,
            )  # fmt: skip
        for opening in landing.openings:
            if opening.layer == layer and seq > max(opening.after, done):
                self._early(transfer, opening, name, seq)
        if not landing.left:
            landing.openings.clear()
            for pages, (first, count, _) in landing.pages:
                for page in range(first, first + count):
                    if pages.unlanded.get(page) == transfer.id:
                        del pages.unlanded[page]
            landing.pages.clear()

    def _early(
        self, transfer: TransferState, opening: PendingOpening, name: str, landed: int
    ) -> None:
        if name in opening.counted:
            return
        opening.counted.add(name)
        layer = opening.layer
        self._findings.early_reads += 1
        by = f"step {opening.step}" if opening.step else f"lease {opening.lease}"
        when = "before its bytes had landed" if landed else "and its bytes never landed"
        what = f"{by} read {name} of layer {layer} by transfer {transfer.id} {when}"
        self._findings.violate(
            "R2", what,
            (transfer.planned, transfer.recorded[layer], transfer.done[layer], opening.seq, landed),
            request=opening.request, lease=opening.lease, transfer=transfer.id,
            step=opening.step, layer=layer, component=name,
        )  # fmt: skip

    def never_landed(self, transfer: TransferState) -> None:
        """Nothing more will be heard of a transfer; what was done and has not landed was a lie."""
        bundle, landing = transfer.bundle, transfer.landing
        if bundle is None or landing is None or not (landing.left and self._world.has_landings):
            return
        for layer, names in enumerate(bundle.layer_names):
            done = transfer.done[layer]
            for name in names:
                if not done or (layer, name) in landing.seqs:
                    continue
                what = f"transfer {transfer.id} said that {name} of layer {layer} was done"
                self._findings.violate(
                    "R2", f"{what}, and its bytes never landed", (transfer.planned, done),
                    request=transfer.request, transfer=transfer.id, layer=layer, component=name,
                )  # fmt: skip
                for opening in landing.openings:
                    if opening.layer == layer:
                        self._early(transfer, opening, name, 0)

    def dismiss(self, transfer: TransferState) -> None:
        """Drop a transfer if no later line can refer to it."""
        if transfer.readers or not (transfer.ended or transfer.plan is None):
            return
        if not self._world.is_held(transfer):
            self.drop(transfer)

    def drop(self, transfer: TransferState) -> None:
        """No later line can refer to it, but to bytes of it that have not landed yet."""
        world = self._world
        is_new = world.transfers.pop(transfer.id, None) is not None
        landing = transfer.landing
        if landing is None or not is_new or not landing.left or not transfer.done_mask:
            return
        world.limbo[transfer.id] = transfer
        if len(world.limbo) > MAX_LIMBO:
            oldest = world.limbo.pop(next(iter(world.limbo)))
            self.never_landed(oldest)
