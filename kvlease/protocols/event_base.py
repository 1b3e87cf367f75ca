"""What all log events share: numbering, levels, page runs, and where events go.

Sinks fill in ``seq``, ``t_ns`` and, where the caller left it empty, ``actor``. This module does not
know the kinds of event.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import ClassVar, Literal, Protocol, TypeAlias

import msgspec

SCHEMA_VERSION = 2
"""Grows when a reader of the previous version could misjudge a log of the next."""

Level: TypeAlias = Literal["off", "normal", "audit"]
"""How much is kept: nothing, what a person follows a run by, or all that the rules need."""
PageRun: TypeAlias = tuple[int, int, int]
"""``(first page, number of pages, epoch)``: neighbours of one epoch."""
LayerRun: TypeAlias = tuple[int, int]
"""``(first layer, number of layers)``."""
Tier: TypeAlias = Literal["device", "host", "storage"]
"""Whose page ids a run counts in; remote pages are named by their engine's transfer."""


class Opening(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Layers of one lease that were opened, none before ``after_seq`` had been written."""

    lease: int
    layer: int
    num_layers: int
    after_seq: int


current_actor: ContextVar[str] = ContextVar("kvlease_actor", default="engine")
"""Name of the actor whose task runs; set once at the start of an actor's task."""


class Event(msgspec.Struct, gc=False, omit_defaults=True, tag_field="event"):
    """What every event carries.

    Attributes:
        seq: position in the log, from 1, without gaps; filled in by the sink.
        t_ns: monotonic nanoseconds; filled in by the sink.
        actor: name of the actor that made the transition; the sink takes `current_actor` where
            it is empty, so that pools need not know who called them.
    """

    audit: ClassVar[bool] = True
    """Whether only level ``audit`` keeps it; ``normal`` keeps what a person follows a run by."""

    seq: int = 0
    t_ns: int = 0
    actor: str = ""


class NormalEvent(Event, gc=False):
    """An event that level ``normal`` keeps too."""

    audit: ClassVar[bool] = False


class EventSink(Protocol):
    """Where events go. Callers ask ``audit`` or ``normal`` before they build an event."""

    @property
    def seq(self) -> int:
        """Sequence number of the last event."""
        ...

    @property
    def normal(self) -> bool:
        """Whether events of level ``normal`` are kept."""
        ...

    @property
    def audit(self) -> bool:
        """Whether events of level ``audit`` are kept."""
        ...

    def emit(self, event: Event) -> None:
        """Number, stamp and keep an event; takes it over. Never waits."""
        ...


def runs_of(pages: Sequence[int], epochs: Sequence[int]) -> list[PageRun]:
    """Fold pages, in order, into runs of neighbours with one epoch."""
    runs: list[PageRun] = []
    first = count = epoch = -1
    for page, its_epoch in zip(pages, epochs, strict=True):
        if page == first + count and its_epoch == epoch:
            count += 1
            continue
        if count > 0:
            runs.append((first, count, epoch))
        first, count, epoch = page, 1, its_epoch
    if count > 0:
        runs.append((first, count, epoch))
    return runs
