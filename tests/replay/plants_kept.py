"""Planted faults that only accounts show: hits, work done again, promises, names, guards."""

import msgspec

from kvlease.protocols import events as ev
from tests.replay.build import place_of, story
from tests.replay.plant import Plant, change, put

USAGE = ev.Usage(prompt=33, hit_host=32, computed=1, output=1)
_RECORDED = place_of(story().events, ev.TransferRecord, 1) + 1
"""The line behind which layer 0 of the load may be ordered, and is not done."""


def _lost(times: int, again: bool) -> tuple[ev.Event, ...]:
    """Request 2 loses what it had hit, so many times, and is admitted each time after."""
    admitted = ev.RequestAdmitted(
        request=2, matched_tokens=32, used_tokens=32, hit_pages=(0, 2, 0, 0), reasons={},
        again=again,
    )  # fmt: skip
    lost = ev.RequestPreempted(request=2, reason="load_failed", kept_tokens=32, dropped_tokens=0)
    return (lost, admitted) * times


PLANTS = {
    "a guard that tripped in an actor": Plant(
        "R6",
        put(ev.StepDone, 0, ev.ActorDied(error="a page that is free cannot reclaim", rule="R6")),
        [(ev.ActorDied, 0)],
    ),
    "a guard that stopped a step": Plant(
        "R2", change(ev.StepDiscarded, 0, rule="R2"), [(ev.StepDiscarded, 0)]
    ),
    "a guard of a rule that there is not": Plant(
        "R14", change(ev.StepDiscarded, 0, rule="R99"), [(ev.StepDiscarded, 0)]
    ),
    "layers opened at once that were only recorded": Plant(
        "R2",
        put(
            ev.TransferRecord,
            1,
            ev.LeaseOpen(lease=9, mode="shared", pages=[(0, 2, 1)]),
            ev.LeaseClose(lease=9, opens=[ev.Opening(9, 0, 1, _RECORDED)], at_once=True),
        ),
        [(ev.TransferPlan, 1), (ev.LeaseClose, 3)],
        layer=0,
    ),
    "hits of another tier than was admitted": Plant(
        "R12",
        change(
            ev.RequestFinished, 1, usage=msgspec.structs.replace(USAGE, hit_host=0, hit_device=32)
        ),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1), (ev.RequestFinished, 1)],
        request=2,
    ),
    "hits of a load that failed": Plant(
        "R12",
        put(ev.RequestAdmitted, 1, *_lost(1, again=True)),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 2)],
        request=2,
    ),
    "loads that fail for ever": Plant(
        "R9",
        put(ev.RequestAdmitted, 1, *_lost(9, again=False)),
        [(ev.RequestSubmitted, 1), (ev.RequestPreempted, 7)],
        request=2,
    ),
    "work done again that was not": Plant(
        "R12",
        change(ev.RequestFinished, 1, usage=msgspec.structs.replace(USAGE, recomputed=1)),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1), (ev.RequestFinished, 1)],
        request=2,
    ),
    "a promise to nobody": Plant(
        "R11",
        put(
            ev.PageFree,
            2,
            ev.PageLedger(tier="device", quarantined=0, leased=0, cached=2, reserved=1, free=13),
        ),
        [(ev.PageLedger, 1)],
    ),
    "pages leased to nobody": Plant(
        "R11",
        put(
            ev.PageFree,
            2,
            ev.PageLedger(
                tier="device", quarantined=0, leased=1, cached=1, reserved=0, free=14, pins=0
            ),
        ),
        [(ev.PageLedger, 1)],
    ),
    "a flush that keeps the name": Plant(
        "R10",
        put(ev.PageFree, 1, ev.PageFlush(identity="root")),
        [(ev.PageFlush, 0)],
    ),
    "a name from before a flush": Plant(
        "R10",
        put(ev.PageFree, 1, ev.PageFlush(identity="new")),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1)],
        request=2,
    ),
    "pages of another tenant": Plant(
        "R10",
        change(ev.RequestAdmitted, 1, tenant="other"),
        [(ev.PageReserve, 2), (ev.LeaseOpen, 5), (ev.RequestAdmitted, 1)],
        request=2,
    ),
}
