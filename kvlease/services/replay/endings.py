"""What has not ended when the log does: stuck requests, and what an orderly end must not leave."""

from kvlease.services.replay.opening_rules import OpeningRules
from kvlease.services.replay.pin_rules import check_pins
from kvlease.services.replay.state import GRACE_NS, RequestState, World
from kvlease.services.replay.verdict import Stuck


def stuck_requests(world: World, t_ns: int) -> list[Stuck]:
    """Say of each request that has not ended what it waits for, and who owns the deadline."""
    return [_stuck(world, record, t_ns) for record in world.requests.values()]


def _stuck(world: World, record: RequestState, t_ns: int) -> Stuck:
    line_of = world.findings.lines.line_of
    seqs = [record.seq, record.admitted]
    waits_for, owner, deadline_ns = "its admission", "scheduler", record.deadline_ns
    transfer = layer = None
    components: list[str] = []
    if record.admitted:
        waits_for = "its next step"
        waits = [
            wait
            for waiting in world.waits.values()
            for wait in waiting
            if record.lease and record.lease in wait.leases
        ]
        if waits:
            wait = waits[-1]
            seqs.append(wait.seq)
            transfer, layer, components = wait.transfer, wait.layer, wait.components
            owner, deadline_ns = wait.owner, wait.deadline_ns
            parts = ", ".join(components) or "the bytes"
            waits_for = f"{parts} of layer {layer} by transfer {transfer}"
    return Stuck(
        request=record.id,
        waits_for=waits_for,
        owner=owner,
        deadline_ns=deadline_ns,
        overdue_s=round((t_ns - deadline_ns) / 1e9, 3) if deadline_ns else None,
        lines=[line_of(seq) for seq in seqs if seq],
        transfer=transfer,
        layer=layer,
        components=components,
    )


def check_end(world: World, openings: OpeningRules, seq: int, t_ns: int, is_closed: bool) -> None:
    """Judge what is open when the log ends: all of it if it was closed in order (R9)."""
    violate = world.findings.violate
    for record in world.requests.values():
        is_late = record.deadline_ns and t_ns > record.deadline_ns + GRACE_NS
        if is_late or is_closed:
            how = "at its deadline" if is_late else "when the log was closed"
            what = f"request {record.id} had not ended {how}"
            seqs = (record.seq, record.admitted, seq)
            violate("R9", what, seqs, request=record.id)
    for transfer in [*world.transfers.values(), *world.limbo.values()]:
        openings.never_landed(transfer)
    check_pins(world, seq, t_ns)
    if not is_closed:
        return
    for transfer in world.transfers.values():
        if transfer.planned and (not transfer.ended or world.is_held(transfer)):
            how = "settled" if transfer.ended else "ended"
            what = f"transfer {transfer.id} had not {how} when the log was closed"
            seqs = (transfer.planned, transfer.end, seq)
            violate("R9", what, seqs, transfer=transfer.id, request=transfer.request)
    for wait in {id(wait): wait for waits in world.waits.values() for wait in waits}.values():
        what = (
            f"the wait for layer {wait.layer} of transfer {wait.transfer}, whose deadline "
            f"{wait.owner} owns, had not ended when the log was closed"
        )
        violate("R9", what, (wait.seq, seq), transfer=wait.transfer, layer=wait.layer)
    if t_ns > world.blocker_ns + GRACE_NS:
        _check_quarantines(world, seq)
    for lease in world.sequences.values():
        what = f"lease {lease.id} was open when the log was closed"
        violate("R9", what, (lease.seq, seq), lease=lease.id, request=lease.request)
    for number, end in world.ends.items():
        known = world.transfers.get(end.transfer)
        if known is None or not known.planned:
            what = f"lease {number} was open when the log was closed"
            violate("R9", what, (end.seq, seq), lease=number, transfer=end.transfer)


def _check_quarantines(world: World, seq: int) -> None:
    """Pages leave quarantine: soon after all that they wait for is over."""
    for waiting in world.quarantines.values():
        if world.is_over(waiting):
            what = (
                f"{waiting.num_pages} pages were in quarantine when the log was closed, and all "
                "that they waited for was over"
            )
            world.findings.violate("R9", what, (waiting.seq, seq))
