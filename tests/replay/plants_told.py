"""Planted faults of one field: a line that contradicts itself, or what the others tell (R14)."""

import msgspec

from kvlease.protocols import events as ev
from tests.replay.build import story
from tests.replay.plant import Plant, change, drop

USAGE = ev.Usage(prompt=33, hit_host=32, computed=1, output=1)
_LATER = len(story().events)
"""Not written yet when any line but the last is."""


def _row(request: int = 1, count: int = 33) -> ev.Row:
    return ev.Row(request, 1, 0, count, 1)


PLANTS = {
    "a step that opened layers after its own line": Plant(
        "R14",
        change(ev.StepRead, 2, opens=[ev.Opening(2, 0, 2, _LATER)]),
        [(ev.StepRead, 2)],
    ),
    "a reader that opened layers after its own line": Plant(
        "R14",
        change(ev.LeaseClose, 5, opens=[ev.Opening(3, 0, 2, _LATER)]),
        [(ev.LeaseClose, 5)],
    ),
    "a reader that tells of another's opening": Plant(
        "R14",
        change(ev.LeaseClose, 5, opens=[ev.Opening(2, 0, 2, 1)]),
        [(ev.LeaseOpen, 6), (ev.LeaseClose, 5)],
    ),
    "a reader that opened layers which the model has not": Plant(
        "R1",
        change(ev.LeaseClose, 5, opens=[ev.Opening(3, 1, 2, 1)]),
        [(ev.LeaseClose, 5)],
    ),
    "a load done without one of its layers": Plant(
        "R14",
        drop(ev.TransferLayerDone, 1),
        [(ev.TransferPlan, 1), (ev.TransferRecord, 2), (ev.TransferDone, 1)],
        layer=1,
    ),
    "done with more bytes": Plant(
        "R5", change(ev.TransferDone, 0, nbytes=99), [(ev.TransferPlan, 0), (ev.TransferDone, 0)]
    ),
    "a layer done with more bytes": Plant(
        "R5",
        change(ev.TransferLayerDone, 0, nbytes=99),
        [(ev.TransferPlan, 1), (ev.TransferLayerDone, 0)],
        layer=0,
    ),
    "a row of another's request": Plant(
        "R14",
        change(ev.StepDone, 0, rows=[_row(request=2)]),
        [(ev.LeaseOpen, 0), (ev.StepDone, 0)],
        request=1,
    ),
    "a row that writes nothing": Plant(
        "R14",
        change(ev.StepDone, 2, rows=[ev.Row(1, 1, 34, 0, 1)]),
        [(ev.LeaseOpen, 0), (ev.StepDone, 2)],
        request=1,
    ),
    "rows of a request that was not admitted": Plant(
        "R14",
        drop(ev.RequestAdmitted, 0),
        [(ev.RequestSubmitted, 0), (ev.LeaseOpen, 0), (ev.StepDone, 0)],
        request=1,
    ),
    "more tokens used than matched": Plant(
        "R14",
        change(ev.RequestAdmitted, 1, matched_tokens=16),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1)],
        request=2,
    ),
    "more tokens matched than the prompt has": Plant(
        "R14",
        change(ev.RequestAdmitted, 1, matched_tokens=48),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1)],
        request=2,
    ),
    "hits that do not come to the tokens used": Plant(
        "R14",
        change(ev.RequestAdmitted, 1, hit_pages=(0, 1, 0, 0)),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1)],
        request=2,
        also=frozenset({"R12"}),
    ),
    "fewer pages used than leased": Plant(
        "R14",
        change(ev.RequestAdmitted, 1, used_tokens=16, hit_pages=(0, 1, 0, 0)),
        [(ev.RequestSubmitted, 1), (ev.LeaseOpen, 5), (ev.RequestAdmitted, 1)],
        request=2,
        also=frozenset({"R12"}),
    ),
    "pages reserved in another's name": Plant(
        "R14",
        change(ev.PageReserve, 3, request=1),
        [(ev.LeaseOpen, 5), (ev.PageReserve, 3)],
        request=2,
    ),
    "pages sealed in another's name": Plant(
        "R14",
        change(ev.PageSeal, 0, request=2),
        [(ev.LeaseOpen, 0), (ev.PageSeal, 0)],
        request=1,
    ),
    "a request admitted with less than no page": Plant(
        "R14",
        change(ev.RequestAdmitted, 1, hit_pages=(1, 2, -1, 0)),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1)],
        request=2,
        also=frozenset({"R12"}),
    ),
    "less than no token to compute": Plant(
        "R14",
        change(ev.RequestAdmitted, 1, reasons={"new": -1}),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1)],
        request=2,
    ),
    "less than no token from storage": Plant(
        "R12",
        change(
            ev.RequestFinished,
            1,
            usage=msgspec.structs.replace(USAGE, hit_host=1, hit_storage=-1),
        ),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1), (ev.RequestFinished, 1)],
        request=2,
    ),
    "less than no token computed again": Plant(
        "R12",
        change(ev.RequestFinished, 1, usage=msgspec.structs.replace(USAGE, recomputed=-1)),
        [(ev.RequestSubmitted, 1), (ev.RequestAdmitted, 1), (ev.RequestFinished, 1)],
        request=2,
    ),
    "an end that was opened for another transfer": Plant(
        "R14",
        change(ev.LeaseOpen, 1, transfer=2),
        [(ev.LeaseOpen, 1), (ev.TransferPlan, 0)],
    ),
    "a destination that was opened for another transfer": Plant(
        "R14",
        change(ev.LeaseOpen, 4, transfer=1),
        [(ev.LeaseOpen, 4), (ev.TransferPlan, 1)],
        also=frozenset({"R2"}),
    ),
    "a reader's lease that claims to be a transfer's end": Plant(
        "R14",
        change(ev.LeaseOpen, 6, transfer=2),
        [(ev.LeaseOpen, 6), (ev.LeaseClose, 5)],
    ),
    "a sequence's lease on another tier than its pages": Plant(
        "R14",
        change(ev.LeaseOpen, 0, tier="storage"),
        [(ev.LeaseOpen, 0), (ev.PageReserve, 0)],
        request=1,
        also=frozenset({"R3"}),
    ),
    "a destination's lease on another tier than its pages": Plant(
        "R14",
        change(ev.LeaseOpen, 2, tier="device"),
        [(ev.LeaseOpen, 2), (ev.PageReserve, 1)],
        also=frozenset({"R7"}),
    ),
    "a plan from another tier than its source's": Plant(
        "R7",
        change(ev.TransferPlan, 1, source_tier="storage"),
        [(ev.LeaseOpen, 3), (ev.TransferPlan, 1)],
    ),
    "a log closed with another number of lines": Plant(
        "R14", change(ev.LogClose, 0, events=7), [(ev.LogClose, 0)]
    ),
    "a wait of a lease that is not open": Plant(
        "R14", change(ev.LeaseWait, 0, leases=[2, 77]), [(ev.LeaseWait, 0)]
    ),
    "a wait for a transfer that nobody needs": Plant(
        "R14", change(ev.LeaseWait, 0, transfer=1), [(ev.LeaseWait, 0)]
    ),
    "a wait for a layer that the model has not": Plant(
        "R14", change(ev.LeaseWait, 0, layer=2), [(ev.LeaseWait, 0)]
    ),
    "a stall of less than no time": Plant(
        "R14", change(ev.StepRead, 2, stalls=[ev.Stall(2, 0, -1)]), [(ev.StepRead, 2)]
    ),
    "a seal between two pages": Plant(
        "R10", change(ev.PageSeal, 0, start=1), [(ev.LeaseOpen, 0), (ev.PageSeal, 0)], request=1
    ),
    "layers planned that the model has not": Plant(
        "R14", change(ev.TransferPlan, 1, layers=(0, 3)), [(ev.TransferPlan, 1)]
    ),
    "layers recorded that the model has not": Plant(
        "R14",
        change(ev.TransferRecord, 0, layers=(0, 1 << 31)),
        [(ev.TransferPlan, 0), (ev.TransferRecord, 0)],
    ),
    "layers done that the model has not": Plant(
        "R14",
        change(ev.TransferLayerDone, 1, layers=(1, 1 << 31)),
        [(ev.TransferPlan, 1), (ev.TransferLayerDone, 1)],
    ),
}
