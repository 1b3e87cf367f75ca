"""A small log with one of everything that pictures show: the events that one of trouble has."""

from collections.abc import Iterator, Sequence

import msgspec

from kvlease.protocols import events as ev
from kvlease.services.replay.verdict import SlowTransfer, StallShare, Stuck, Verdict, Violation

START_NS = 5_000_000_000
USAGE = ev.Usage(prompt=600, hit_host=512, computed=88, output=2)


def _head() -> ev.LogOpen:
    latent = ev.ComponentFacts(name="latent", kind="span", layers=[0, 1], nbytes=64)
    return ev.LogOpen(
        schema=ev.SCHEMA_VERSION, program="kvlease test", level="audit", model="tiny",
        identity="ab", num_layers=2, page_tokens=256, components=[latent], device_pages=8,
        host_pages=16,
    )  # fmt: skip


def _plan(transfer: int, request: int, first: int, leases: tuple[int, int]) -> ev.TransferPlan:
    return ev.TransferPlan(
        transfer=transfer, direction="load", source_tier="host", source=[(first, 2, 0)],
        source_lease=leases[0], destination_tier="device", destination=[(first, 2, 0)],
        destination_lease=leases[1], layers=(0, 2), components=["latent"], nbytes=256,
        deadline_ns=START_NS + 10**9, owner="loader", request=request,
    )  # fmt: skip


def _load(transfer: int, request: int, first: int, lease: int) -> list[ev.Event]:
    """A request gets pages that a load will fill."""
    ends = (lease + 1, lease + 2)
    run = [(first, 2, 0)]
    return [
        ev.RequestSubmitted(
            request=request, prompt_tokens=600, max_tokens=9, deadline_ns=START_NS + 10**9
        ),
        ev.LeaseOpen(lease=ends[0], mode="shared", pages=run, tier="host", transfer=transfer),
        ev.LeaseOpen(lease=ends[1], mode="exclusive", pages=[], transfer=transfer),
        ev.PageReserve(pages=run, lease=ends[1], request=request),
        ev.LeaseOpen(lease=lease, mode="shared", pages=run, request=request),
        _plan(transfer, request, first, ends),
        ev.RequestAdmitted(
            request=request, matched_tokens=512, used_tokens=512, hit_pages=(0, 2, 0, 0),
            reasons={"new": 88}, decision="load",
        ),
    ]  # fmt: skip


def scene() -> list[ev.Event]:
    """Two requests share a step; one's load arrives, the other's fails, and it is never heard of.

    Lines 1 to 44. Request 1 ends well, 2 waits for ever, 3 is preempted and fails.
    """
    events: list[ev.Event] = [
        _head(),
        ev.ActorStart(actor="loader"),
        *_load(1, 1, 0, 10),
        *_load(2, 2, 2, 20),
        ev.TransferRecord(transfer=1, layers=(0, 2), actor="loader"),
        ev.LeaseWait(
            leases=[10], layer=1, components=["latent"], transfer=1, owner="loader",
            deadline_ns=START_NS + 10**9, step=1,
        ),
        ev.TransferLanded(transfer=1, layer=0, component="latent", nbytes=128),
        ev.TransferLayerDone(transfer=1, layers=(0, 1), nbytes=128, actor="loader"),
        ev.TransferLanded(transfer=1, layer=1, component="latent", nbytes=128),
        ev.TransferLayerDone(transfer=1, layers=(1, 1), nbytes=128, actor="loader"),
        ev.TransferDone(transfer=1, nbytes=256, actor="loader"),
        ev.PageSeal(pages=[(0, 2, 0)], lease=12, request=1),
        ev.LeaseClose(lease=11),
        ev.LeaseClose(lease=12),
        ev.StepRead(step=1, opens=[ev.Opening(10, 0, 2, 20)], stalls=[ev.Stall(1, 1, 1500)]),
        ev.StepDone(step=1, read=1, rows=[ev.Row(1, 10, 512, 88, 1)], kind="prefill"),
        ev.StepDone(step=2, read=1, rows=[ev.Row(1, 10, 600, 1, 1)]),
        ev.TransferFail(transfer=2, reason="the link broke", nbytes=0, actor="loader"),
        ev.StepDiscarded(step=3, read=3, reason="its load failed", transfers=[2]),
        ev.LeaseClose(lease=21),
        ev.LeaseClose(lease=22),
        ev.PageQuarantine(pages=[(2, 2, 0)], transfers=[2]),
        ev.PageFree(pages=[(2, 2, 0)]),
        ev.RequestFinished(request=1, reason="stop", usage=USAGE),
        ev.LeaseClose(lease=10),
        ev.RequestSubmitted(request=3, prompt_tokens=10, max_tokens=1),
        ev.RequestAdmitted(
            request=3, matched_tokens=0, used_tokens=0, hit_pages=(0, 0, 0, 0), reasons={"new": 10}
        ),
        ev.RequestPreempted(request=3, reason="pages", kept_tokens=0, dropped_tokens=0),
        ev.RequestFailed(request=3, reason="deadline", usage=USAGE),
        ev.ActorDied(actor="loader", error="ValueError: bad"),
        ev.LeaseWait(
            leases=[20], layer=0, components=["latent"], transfer=2, owner="loader",
            deadline_ns=START_NS + 10**9, step=4,
        ),
        ev.PageLedger(tier="device", quarantined=0, leased=0, cached=2, reserved=0, free=6),
    ]  # fmt: skip
    return stamped(events)


def stamped(events: Sequence[ev.Event]) -> list[ev.Event]:
    """Number events and let a millisecond pass between them."""
    for seq, event in enumerate(events, 1):
        event.seq = seq
        event.t_ns = START_NS + seq * 1_000_000
        event.actor = event.actor or "scheduler"
    return list(events)


def numbered(events: Sequence[ev.Event]) -> Iterator[tuple[int, ev.Event]]:
    """Events with their lines."""
    return iter(enumerate(events, 1))


def found(events: Sequence[ev.Event]) -> Verdict:
    """What a check could have said of the scene: one violation, one stuck request."""
    early = Violation(
        rule="R2", what="layer 1 was opened before <its> bytes had landed", lines=[8, 17, 21, 27],
        request=1, transfer=1, layer=1, component="latent",
    )  # fmt: skip
    stuck = Stuck(
        request=2, waits_for="layer 0 of transfer 2", owner="loader", deadline_ns=0,
        overdue_s=None, lines=[10, 43], transfer=2, layer=0, components=["latent"],
    )  # fmt: skip
    slow = SlowTransfer(
        transfer=1, direction="load", ended="done", ms=15.0, nbytes=256, pages=2, lines=[8, 23]
    )
    return msgspec.structs.replace(
        clean(events), verdict="violations", violations=[early], violation_counts={"R2": 1},
        stuck=[stuck], slowest_transfers=[slow], early_reads=1, is_closed=False,
        stalls=[StallShare(layer=1, tier="host", waits=1, total_ms=1.5, longest_ms=1.5)],
    )  # fmt: skip


def clean(events: Sequence[ev.Event]) -> Verdict:
    """A verdict without findings."""
    span_s = (events[-1].t_ns - events[0].t_ns) / 1e9 if events else 0.0
    return Verdict(
        verdict="clean", violations=[], violation_counts={}, cannot_tell=[], early_reads=None,
        stuck=[], stalls=[], slowest_transfers=[], events=len(events), event_counts={},
        unknown_events=0, unknown_types={}, is_closed=True, span_s=span_s, wall_s=0.1,
    )  # fmt: skip
