"""Log events of movement and of compute: ``transfer.*`` and ``step.*``."""

from typing import Literal

import msgspec

from kvlease.protocols.event_base import (
    Event,
    LayerRun,
    NormalEvent,
    Opening,
    PageRun,
    Tier,
)


class TransferPlan(Event, tag="transfer.plan", kw_only=True, gc=False):
    """A movement was planned with both ends held (R7).

    Attributes:
        source, destination: pages in the same order; a tier each.
        source_lease, destination_lease: shared and exclusive, opened before and closed when no
            copy touches the pages any more, which may be after the transfer's end.
        tails: how many kept tails move beside the pages; a load brings one at most (R5).
        reader: the sequence lease whose running state the tail of a load fills; 0 for none.
        components: names of all components that move.
        nbytes: planned bytes, all layers and components.
    """

    transfer: int
    direction: Literal["load", "store", "fetch", "flush", "send", "receive"]
    source_tier: Tier
    source: list[PageRun]
    source_lease: int
    destination_tier: Tier
    destination: list[PageRun]
    destination_lease: int
    layers: LayerRun
    components: list[str]
    nbytes: int
    deadline_ns: int
    owner: str
    tails: int = 0
    reader: int = 0
    request: int = 0


class TransferRecord(Event, tag="transfer.record", kw_only=True, gc=False):
    """The completion of these layers is recorded: readers may be ordered behind it (R2)."""

    transfer: int
    layers: LayerRun
    components: list[str] = []
    """Which components; empty means all of the plan's."""


class TransferLayerDone(Event, tag="transfer.layer_done", kw_only=True, gc=False):
    """The bytes of these layers are true; ``nbytes`` as counted, not as planned (R5)."""

    transfer: int
    layers: LayerRun
    nbytes: int
    components: list[str] = []


class TransferLanded(Event, tag="transfer.landed", kw_only=True, gc=False):
    """The bytes of one component of one layer are really there, whatever its completion says.

    Only a device that knows writes it: a simulated one. An honest completion comes after it.
    """

    transfer: int
    layer: int
    component: str
    nbytes: int


class TransferDone(Event, tag="transfer.done", kw_only=True, gc=False):
    """Everything planned arrived."""

    transfer: int
    nbytes: int


class TransferFail(NormalEvent, tag="transfer.fail", kw_only=True, gc=False):
    """The movement ended without all its bytes; its readers recompute."""

    transfer: int
    reason: str
    nbytes: int = 0


class TransferRevoke(NormalEvent, tag="transfer.revoke", kw_only=True, gc=False):
    """The movement was called off before all its bytes came; its readers recompute."""

    transfer: int
    reason: str


class TransferLate(NormalEvent, tag="transfer.late", kw_only=True, gc=False):
    """The deadline passed while bytes were still moving; they may land, nobody reads them."""

    transfer: int
    owner: str


class Stall(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How long a step's compute really stood still for one layer of a transfer."""

    transfer: int
    layer: int
    wait_us: int


class Row(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One sequence in a step: rows of positions ``start .. start + count`` were written."""

    request: int
    lease: int
    start: int
    count: int
    published: int = 0
    """Output tokens that the step published for it."""


class StepRead(Event, tag="step.read", kw_only=True, gc=False):
    """A step has opened these layers of these leases; later steps may refer to it."""

    step: int
    opens: list[Opening]
    stalls: list[Stall] = []


class StepRan(Event, tag="step.ran", kw_only=True, gc=False):
    """The device has come to the end of a step's work, whatever its completion says.

    Only a device that knows writes it: a simulated one. An honest ``step.done`` comes after it.
    """

    step: int


class StepDone(Event, tag="step.done", kw_only=True, gc=False):
    """A step's tokens were published: every completion it resolved is done (R2).

    ``read`` is the step whose ``step.read`` names what this one opened.
    """

    step: int
    read: int
    rows: list[Row]
    kind: Literal["prefill", "decode", "mixed"] = "decode"


class StepDiscarded(NormalEvent, tag="step.discarded", kw_only=True, gc=False):
    """A step published nothing, because a completion it had resolved failed (R2).

    ``rule`` is the rule that a guard kept by ending it, if one did.
    """

    step: int
    read: int
    reason: str
    transfers: list[int] = []
    rule: str = ""
