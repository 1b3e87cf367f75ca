"""Guards taken away one by one, each with the rule that the exploration must then find broken."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvlease.protocols import machines
from kvlease.protocols.machines import Copy, CopyEvent, PageEvent, PageState
from kvlease.protocols.ports import CompletionState
from tests.rules.guards import Guards, may_open
from tests.rules.state import Size

LOAD = Size("a load", cached=1, num_readers=1, transfers=1, loads=True)
WRITE = Size("a writer behind a load", cached=1, has_writer=True, transfers=1, loads=True)
STORE = Size("a store", has_writer=True, transfers=1, stores=True)
TWO_LOADS = Size("two loads", cached=1, transfers=2, loads=True)
BESIDE = Size("a reader beside a writer", host_pages=0, num_readers=1, has_writer=True)
GRANT = Size("a grant", host_pages=0, has_remote=True)
GRANT_BESIDE = Size("a grant beside a writer", host_pages=0, has_writer=True, has_remote=True)

PageStep = Callable[[PageState, PageEvent], PageState]


@dataclass(frozen=True)
class Planted:
    """A guard that is gone, a world small enough to show it, and the rule that breaks."""

    name: str
    size: Size
    guards: Guards
    rule: str


def also(before: PageState, event: PageEvent, after: PageState) -> PageStep:
    """Return the page machine with one transition more, or another one."""

    def step(state: PageState, happens: PageEvent) -> PageState:
        if (state, happens) == (before, event):
            return after
        return machines.step_page(state, happens)

    return step


def finish_from_planned(copy: Copy, event: CopyEvent, nbytes: int = 0) -> Copy:
    """Work that nobody has recorded may end."""
    if copy.state is CompletionState.PLANNED and event is CopyEvent.FINISH:
        return Copy(copy.planned_nbytes, nbytes, CompletionState.DONE)
    return machines.step_copy(copy, event, nbytes)


def short_is_done(copy: Copy, event: CopyEvent, nbytes: int = 0) -> Copy:
    """Fewer bytes than planned pass for all of them."""
    enough = copy.planned_nbytes if event is CopyEvent.FINISH else nbytes
    return machines.step_copy(copy, event, enough)


def first_component_decides(parts: list[Copy]) -> CompletionState:
    """The index keys of a layer are not waited for: the incident of the design's first page."""
    return machines.joint_state(parts[:1])


def planted(name: str, size: Size, rule: str, **gone: object) -> Planted:
    """Name a guard that is gone."""
    return Planted(name, size, replace(Guards(), **gone), rule)  # type: ignore[arg-type]


FREE, EXCLUSIVE = PageState.FREE, PageState.EXCLUSIVE
SEALED, QUARANTINED = PageState.SEALED, PageState.QUARANTINED

PLANTED = (
    # The machines.
    planted("a sealed page may be taken for writing", BESIDE, "R4",
            step_page=also(SEALED, PageEvent.ACQUIRE, EXCLUSIVE)),
    planted("a held page may be handed out", GRANT_BESIDE, "R3",
            step_page=also(EXCLUSIVE, PageEvent.ACQUIRE, EXCLUSIVE)),
    planted("a load's target need not be free", WRITE, "R3",
            step_page=also(EXCLUSIVE, PageEvent.ACQUIRE, EXCLUSIVE)),
    planted("a quarantined page may be handed out", LOAD, "R6",
            step_page=also(QUARANTINED, PageEvent.ACQUIRE, EXCLUSIVE)),
    planted("release skips quarantine", LOAD, "R6",
            step_page=also(SEALED, PageEvent.RELEASE, FREE)),
    planted("a copy may finish that was only planned", LOAD, "R5", step_copy=finish_from_planned),
    planted("a short copy counts as done", LOAD, "R5", step_copy=short_is_done),
    planted("the first component decides for its layer", LOAD, "R1",
            joint_state=first_component_decides),
    # Readers.
    planted("a layer opens that is only planned", LOAD, "R1", may_open=lambda _: True),
    planted("a failed layer opens and its bytes are published", LOAD, "R2",
            may_open=lambda layer: may_open(layer) or layer is CompletionState.FAILED,
            may_publish=lambda layer: layer.is_final),
    planted("the reader's stream does not wait", LOAD, "R2", may_run=lambda _: True),
    planted("tokens are published before done", WRITE, "R2",
            may_run=lambda _: True, may_seal=lambda _: True),
    planted("a page is sealed without verifying what it read", WRITE, "R2",
            may_seal=lambda _: True),
    planted("a closed lease forgets what it launched", LOAD, "R6", closes_after_last_use=False),
    planted("an aborted writer forgets its step", STORE, "R6", closes_after_last_use=False),
    planted("the epoch is not bumped", LOAD, "R8", bumps_epoch=False),
    # Pools.
    planted("reclaim ignores blockers", LOAD, "R6", may_reclaim=lambda _: True),
    planted("eviction ignores pins", LOAD, "R6", may_evict=lambda _, in_flight: not in_flight),
    planted("eviction ignores pins and flights", LOAD, "R7", may_evict=lambda _, __: True),
    planted("promised pages are given away", GRANT_BESIDE, "R11",
            may_promise=lambda free, _: free > 0),
    planted("a lost page does not wait for its copies", LOAD, "R6", lost_waits_for_copies=False),
    planted("a lost page does not wait for its readers", LOAD, "R6", lost_waits_for_readers=False),
    planted("a bad host page does not wait for other loads", TWO_LOADS, "R6",
            dropped_waits_for_loads=False),
    # Transfers.
    planted("the source is let go at the end", STORE, "R6", source_held_until_settled=False),
    planted("a running copy counts as settled", LOAD, "R6",
            is_settled=lambda whole, _: whole.is_final),
    planted("a copy begins after the end", LOAD, "R6", may_begin=lambda _: True),
    planted("a transfer that is stuck has no deadline", LOAD, "R9", has_deadline=False),
    planted("readers of a lost load are not told", LOAD, "R9", lost_is_told=False),
    planted("the settling of a lost load is not told", LOAD, "R9", settling_is_told=False),
    # Remote writers.
    planted("an expired grant's pages are used again", GRANT, "R6", grant_held_until_stopped=False),
    planted("a write under an expired grant's epochs is let in", GRANT, "R8",
            accepts=lambda is_open, same_peer, _: is_open and same_peer),
    planted("a write of the peer's older life is let in", GRANT, "R8",
            accepts=lambda is_open, _, same_epochs: is_open and same_epochs),
    planted("a dead peer's connection ends nothing", GRANT, "R9", connection_end_stops=False),
)  # fmt: skip
