"""Planted faults of use: rows, readiness, owners, sealed pages, bundles (R1 to R5)."""

from kvlease.protocols import events as ev
from tests.replay.build import SPANS
from tests.replay.plant import Plant, all_of, change, drop, landings, put, swap

PLANTS = {
    # R1: no rows without a resolved completion
    "rows of a step that opened nothing": Plant(
        "R1", drop(ev.StepRead, 0), [(ev.LeaseOpen, 0), (ev.StepDone, 0)], request=1
    ),
    "rows without one of the layers": Plant(
        "R1",
        change(ev.StepRead, 0, opens=[ev.Opening(1, 0, 1, 6)]),
        [(ev.LeaseOpen, 0), (ev.StepRead, 0), (ev.StepDone, 0)],
        request=1,
        layer=1,
    ),
    "rows that name a read before the lease's latest": Plant(
        "R1",
        change(ev.StepDone, 2, read=1),
        [(ev.LeaseOpen, 0), (ev.StepRead, 1), (ev.StepDone, 2)],
        request=1,
    ),
    "an opening of a lease that never was": Plant(
        "R1",
        change(ev.StepRead, 0, opens=[ev.Opening(1, 0, 2, 6), ev.Opening(77, 0, 2, 6)]),
        [(ev.StepRead, 0)],
    ),
    "rows of a lease that was closed": Plant(
        "R1",
        swap((ev.StepDone, 2), (ev.LeaseClose, 2)),
        [(ev.StepDone, 2)],
        also=frozenset({"R12"}),
    ),
    # R2: readiness is bound where it is used
    "a layer opened before it was recorded": Plant(
        "R2",
        swap((ev.TransferRecord, 2), (ev.StepRead, 2)),
        [(ev.TransferPlan, 1), (ev.StepRead, 2)],
        request=2,
        layer=1,
        component="latent",
    ),
    "a layer opened before it was recorded, told later": Plant(
        "R2",
        change(ev.StepRead, 2, opens=[ev.Opening(2, 0, 2, 36)]),
        [(ev.TransferPlan, 1), (ev.TransferRecord, 2), (ev.StepRead, 2)],
        request=2,
        layer=1,
        component="latent",
    ),
    "published before a layer was done": Plant(
        "R2",
        all_of(
            swap((ev.TransferLayerDone, 1), (ev.StepRead, 2)),
            swap((ev.TransferLayerDone, 1), (ev.StepDone, 3)),
        ),
        [(ev.TransferPlan, 1), (ev.StepRead, 2), (ev.StepDone, 3)],
        request=2,
        layer=1,
        also=frozenset({"R5"}),
    ),
    "a read that came early": Plant(
        "R2",
        landings((1, "index_k")),
        [
            (ev.TransferPlan, 1),
            (ev.TransferRecord, 2),
            (ev.TransferLayerDone, 1),
            (ev.StepRead, 2),
            (ev.TransferLanded, 9),
        ],
        request=2,
        layer=1,
        component="index_k",
    ),
    "a completion whose bytes never landed": Plant(
        "R2",
        landings((0, "window"), never=True),
        [(ev.TransferPlan, 1), (ev.TransferLayerDone, 0)],
        layer=0,
        component="window",
    ),
    "a page sealed before it was written": Plant(
        "R2",
        change(ev.StepDone, 0, rows=[ev.Row(1, 1, 0, 31, 1)]),
        [(ev.LeaseOpen, 0), (ev.StepRead, 0), (ev.PageSeal, 0)],
        request=1,
    ),
    "a destination sealed before its transfer was done": Plant(
        "R2",
        swap((ev.TransferDone, 0), (ev.PageSeal, 1)),
        [(ev.TransferPlan, 0), (ev.PageSeal, 1)],
    ),
    "a layer done that was never recorded": Plant(
        "R2",
        drop(ev.TransferRecord, 1),
        [(ev.TransferPlan, 1), (ev.TransferLayerDone, 0)],
        layer=0,
    ),
    # R3: a write has one owner
    "a held page reserved": Plant(
        "R3",
        put(ev.PageReserve, 0, ev.PageReserve(pages=[(1, 1, 0)], lease=1, request=1)),
        [(ev.PageReserve, 0), (ev.PageReserve, 1)],
        request=1,
    ),
    "rows behind the pages of the lease": Plant(
        "R3",
        change(ev.StepDone, 0, rows=[ev.Row(1, 1, 0, 60, 1)]),
        [(ev.LeaseOpen, 0), (ev.StepDone, 0)],
        request=1,
    ),
    "rows on a shared prefix": Plant(
        "R3",
        change(ev.StepDone, 3, rows=[ev.Row(2, 2, 31, 2, 1)]),
        [(ev.LeaseOpen, 5), (ev.StepDone, 3)],
        request=2,
    ),
    "a lease on a page that another writes": Plant(
        "R3",
        put(
            ev.PageReserve,
            0,
            ev.LeaseOpen(lease=50, mode="shared", pages=[(2, 1, 0)]),
            ev.LeaseClose(lease=50),
        ),
        [(ev.PageReserve, 0), (ev.LeaseOpen, 1)],
    ),
    "pages reserved for nobody": Plant(
        "R3",
        put(ev.RequestSubmitted, 0, ev.PageReserve(pages=[(9, 1, 0)], lease=99)),
        [(ev.PageReserve, 0)],
        also=frozenset({"R11"}),
    ),
    "pages sealed by another lease": Plant(
        "R3",
        change(ev.PageSeal, 1, lease=110),
        [(ev.PageReserve, 1), (ev.PageSeal, 1)],
    ),
    # R4: a sealed page never changes
    "rows on a sealed page": Plant(
        "R4",
        change(ev.StepDone, 1, rows=[ev.Row(1, 1, 20, 1, 1)]),
        [(ev.PageSeal, 0), (ev.StepDone, 1)],
        request=1,
    ),
    "a page sealed twice": Plant(
        "R4",
        put(ev.PageSeal, 0, ev.PageSeal(pages=[(1, 1, 0)], lease=1, request=1, start=16)),
        [(ev.PageSeal, 0), (ev.PageSeal, 1)],
        request=1,
    ),
    "a sealed page found changed": Plant(
        "R4",
        put(
            ev.PageSeal,
            2,
            ev.PageMismatch(pages=[(1, 1, 1)], layer=1, component="index_k", request=2),
        ),
        [(ev.PageSeal, 2), (ev.PageMismatch, 0)],
        request=2,
        layer=1,
        component="index_k",
    ),
    # R5: whole bundles
    "a component left out": Plant(
        "R5",
        change(ev.TransferPlan, 1, components=["latent", "window"]),
        [(ev.TransferPlan, 1)],
        component="index_k",
    ),
    "a component that nobody knows": Plant(
        "R5",
        change(ev.TransferPlan, 1, components=[*SPANS, "window", "ghost"]),
        [(ev.TransferPlan, 1)],
    ),
    "other bytes than the components'": Plant(
        "R5", change(ev.TransferPlan, 1, nbytes=63), [(ev.TransferPlan, 1)]
    ),
    "a layer left out": Plant(
        "R5", change(ev.TransferPlan, 0, layers=(0, 1)), [(ev.TransferPlan, 0)]
    ),
    "done with fewer bytes": Plant(
        "R5", change(ev.TransferDone, 1, nbytes=40), [(ev.TransferPlan, 1), (ev.TransferDone, 1)]
    ),
    "a layer done with fewer bytes": Plant(
        "R5",
        change(ev.TransferLayerDone, 0, nbytes=1),
        [(ev.TransferPlan, 1), (ev.TransferLayerDone, 0)],
        layer=0,
    ),
    "a prefix resumed without a tail": Plant(
        "R5",
        change(ev.TransferPlan, 1, reader=0),
        [(ev.LeaseOpen, 5), (ev.StepDone, 3)],
        request=2,
    ),
}
