"""Planted faults of release, ends and accounts (R6 to R12), and lines that contradict others."""

import msgspec

from kvlease.protocols import events as ev
from tests.replay.plant import Plant, all_of, change, drop, put, swap

USAGE = ev.Usage(prompt=33, hit_host=32, computed=1, output=1)
PLANTS = {
    # R6: released is not free
    "a page freed under a lease": Plant(
        "R6", swap((ev.LeaseClose, 2), (ev.PageFree, 0)), [(ev.LeaseOpen, 0), (ev.PageFree, 0)]
    ),
    "a page freed before a step was over": Plant(
        "R6",
        swap((ev.StepDiscarded, 0), (ev.PageFree, 2)),
        [(ev.PageQuarantine, 0), (ev.PageFree, 2)],
    ),
    "a page freed before a transfer had settled": Plant(
        "R6",
        all_of(
            put(
                ev.TransferPlan,
                1,
                ev.PageReserve(pages=[(9, 1, 0)], lease=2, request=2),
                ev.PageQuarantine(pages=[(9, 1, 0)], transfers=[2]),
                ev.PageFree(pages=[(9, 1, 0)]),
            ),
        ),
        [(ev.TransferPlan, 1), (ev.PageQuarantine, 0), (ev.PageFree, 2)],
    ),
    "a page freed before a named lease was closed": Plant(
        "R6",
        all_of(
            change(ev.PageQuarantine, 0, steps=[], leases=[3]),
            swap((ev.LeaseClose, 5), (ev.LeaseClose, 6)),
            swap((ev.LeaseClose, 6), (ev.PageQuarantine, 0)),
            swap((ev.LeaseClose, 6), (ev.PageFree, 2)),
        ),
        [(ev.LeaseOpen, 6), (ev.PageQuarantine, 0), (ev.PageFree, 2)],
    ),
    "a page freed twice": Plant(
        "R6",
        put(ev.PageFree, 1, ev.PageFree(pages=[(2, 1, 0)])),
        [(ev.PageFree, 0), (ev.PageFree, 2)],
        also=frozenset({"R8"}),
    ),
    "bytes that landed in a room given back": Plant(
        "R6",
        put(ev.LeaseClose, 4, ev.TransferLanded(transfer=2, layer=0, component="latent", nbytes=8)),
        [(ev.TransferPlan, 1), (ev.LeaseClose, 4), (ev.TransferLanded, 0)],
        layer=0,
        component="latent",
        also=frozenset({"R2"}),
    ),
    # R7: both ends are held
    "a source held exclusive": Plant(
        "R7",
        change(ev.LeaseOpen, 1, mode="exclusive"),
        [(ev.LeaseOpen, 1), (ev.TransferPlan, 0)],
        also=frozenset({"R3"}),
    ),
    "a source that is not held": Plant(
        "R7",
        change(ev.LeaseOpen, 1, pages=[(0, 1, 0)]),
        [(ev.LeaseOpen, 1), (ev.TransferPlan, 0)],
    ),
    "a destination lease that is not open": Plant(
        "R7",
        change(ev.TransferPlan, 0, destination_lease=99),
        [(ev.TransferPlan, 0)],
        also=frozenset({"R14"}),
    ),
    "an end let go before the transfer ended": Plant(
        "R7",
        swap((ev.TransferDone, 0), (ev.LeaseClose, 0)),
        [(ev.LeaseOpen, 1), (ev.TransferPlan, 0), (ev.LeaseClose, 0)],
    ),
    # R8: stale references are refused
    "a page reserved under an old epoch": Plant(
        "R8",
        change(ev.PageReserve, 3, pages=[(2, 1, 0)]),
        [(ev.PageFree, 0), (ev.PageReserve, 3)],
        request=2,
    ),
    "a lease under an old epoch": Plant(
        "R8", change(ev.LeaseOpen, 6, pages=[(0, 2, 0)]), [(ev.PageSeal, 2), (ev.LeaseOpen, 6)]
    ),
    "a plan under an old epoch": Plant(
        "R8",
        change(ev.TransferPlan, 1, source=[(4, 2, 3)]),
        [(ev.PageSeal, 1), (ev.TransferPlan, 1)],
    ),
    # R9: everything ends
    "a request that never ended": Plant(
        "R9",
        drop(ev.RequestFinished, 1),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1), (ev.LogClose, 0)],
        request=2,
    ),
    "a lease that was never closed": Plant(
        "R9", drop(ev.LeaseClose, 5), [(ev.LeaseOpen, 6), (ev.LogClose, 0)]
    ),
    "a transfer that never settled": Plant(
        "R9",
        drop(ev.LeaseClose, 1),
        [(ev.TransferPlan, 0), (ev.TransferDone, 0), (ev.LogClose, 0)],
    ),
    "a wait that never ended": Plant(
        "R9", change(ev.LeaseWait, 0, step=99), [(ev.LeaseWait, 0), (ev.LogClose, 0)], layer=0
    ),
    # R10: the key names everything that changes the bytes
    "a page at another place of the prefix": Plant(
        "R10",
        change(ev.LeaseOpen, 6, pages=[(1, 1, 1)]),
        [(ev.PageSeal, 2), (ev.LeaseOpen, 6)],
    ),
    "pages of another identity": Plant(
        "R10",
        change(ev.RequestAdmitted, 1, identity="other"),
        [(ev.PageReserve, 2), (ev.LeaseOpen, 5), (ev.RequestAdmitted, 1)],
        request=2,
    ),
    "a page sealed at a place that is not its own": Plant(
        "R10",
        change(ev.PageSeal, 0, start=16),
        [(ev.LeaseOpen, 0), (ev.PageSeal, 0)],
        request=1,
        also=frozenset({"R2", "R4"}),
    ),
    "a page found under another prefix's tokens": Plant(
        "R10",
        put(
            ev.PageSeal, 2, ev.PageMismatch(pages=[(0, 1, 1)], layer=0, component="key", request=2)
        ),
        [(ev.PageSeal, 2), (ev.PageMismatch, 0)],
        request=2,
        layer=0,
        component="key",
    ),
    # R11: conservation
    "a ledger that counts a page too few": Plant(
        "R11",
        change(ev.PageLedger, 0, free=10),
        [(ev.PageLedger, 0)],
    ),
    "a ledger that knows of fewer leased pages": Plant(
        "R11", change(ev.PageLedger, 0, leased=2, cached=1), [(ev.PageLedger, 0)]
    ),
    "a page evicted that is not cached": Plant(
        "R11",
        put(ev.PageFree, 0, ev.PageEvict(pages=[(2, 1, 1)], tier="device")),
        [(ev.PageFree, 0), (ev.PageEvict, 0)],
    ),
    "a free page released": Plant(
        "R11",
        put(
            ev.RequestSubmitted,
            0,
            ev.PageQuarantine(pages=[(9, 1, 0)], steps=[9]),
            ev.StepDiscarded(step=9, read=0, reason="none"),
            ev.PageFree(pages=[(9, 1, 0)]),
        ),
        [(ev.PageQuarantine, 0)],
    ),
    "a page that the tier does not have": Plant(
        "R11",
        change(ev.PageReserve, 0, pages=[(0, 3, 0), (16, 1, 0)]),
        [(ev.PageReserve, 0)],
        request=1,
    ),
    # R12: every prompt token ends in one bucket
    "buckets that do not add up": Plant(
        "R12",
        change(ev.RequestFinished, 1, usage=msgspec.structs.replace(USAGE, hit_host=16)),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1), (ev.RequestFinished, 1)],
        request=2,
    ),
    "no computed token": Plant(
        "R12",
        change(
            ev.RequestFinished, 1, usage=msgspec.structs.replace(USAGE, hit_host=33, computed=0)
        ),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1), (ev.RequestFinished, 1)],
        request=2,
    ),
    "more output than asked for": Plant(
        "R12",
        change(ev.RequestSubmitted, 0, max_tokens=2),
        [(ev.RequestSubmitted, 0), (ev.RequestAdmitted, 0), (ev.RequestFinished, 0)],
        request=1,
    ),
    "output that no step published": Plant(
        "R12",
        change(ev.RequestFinished, 1, usage=msgspec.structs.replace(USAGE, output=2)),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1), (ev.RequestFinished, 1)],
        request=2,
    ),
    # R14: the lines agree with each other
    "a lease closed twice": Plant(
        "R14", put(ev.LeaseClose, 2, ev.LeaseClose(lease=1)), [(ev.LeaseClose, 3)]
    ),
    "a transfer that ended twice": Plant(
        "R14",
        put(ev.TransferDone, 0, ev.TransferFail(transfer=1, reason="late news")),
        [(ev.TransferDone, 0), (ev.TransferFail, 0)],
    ),
    "a request that ended twice": Plant(
        "R14",
        put(ev.RequestFinished, 0, ev.RequestFailed(request=1, reason="again", usage=USAGE)),
        [(ev.RequestFailed, 0)],
        request=1,
    ),
}
