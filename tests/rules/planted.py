"""Guards taken away one by one, each with the rule that the exploration must then find broken."""

from collections.abc import Callable
from dataclasses import dataclass

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
    rule: str
    guards: Guards


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
    """The index keys of a layer are not waited for: the incident that all this is about."""
    return machines.joint_state(parts[:1])


FREE, EXCLUSIVE = PageState.FREE, PageState.EXCLUSIVE
SEALED, QUARANTINED = PageState.SEALED, PageState.QUARANTINED

PLANTED = (
    # The machines.
    Planted(
        "a sealed page may be taken for writing",
        BESIDE,
        "R4",
        Guards(step_page=also(SEALED, PageEvent.ACQUIRE, EXCLUSIVE)),
    ),
    Planted(
        "a held page may be handed out",
        GRANT_BESIDE,
        "R3",
        Guards(step_page=also(EXCLUSIVE, PageEvent.ACQUIRE, EXCLUSIVE)),
    ),
    Planted(
        "a load's target need not be free",
        WRITE,
        "R3",
        Guards(step_page=also(EXCLUSIVE, PageEvent.ACQUIRE, EXCLUSIVE)),
    ),
    Planted(
        "a quarantined page may be handed out",
        LOAD,
        "R6",
        Guards(step_page=also(QUARANTINED, PageEvent.ACQUIRE, EXCLUSIVE)),
    ),
    Planted(
        "release skips quarantine",
        LOAD,
        "R6",
        Guards(step_page=also(SEALED, PageEvent.RELEASE, FREE)),
    ),
    Planted(
        "a copy may finish that was only planned", LOAD, "R5", Guards(step_copy=finish_from_planned)
    ),
    Planted("a short copy counts as done", LOAD, "R5", Guards(step_copy=short_is_done)),
    Planted(
        "the first component decides for its layer",
        LOAD,
        "R1",
        Guards(joint_state=first_component_decides),
    ),
    # Readers.
    Planted("a layer opens that is only planned", LOAD, "R1", Guards(may_open=lambda _: True)),
    Planted(
        "a failed layer opens and its bytes are published",
        LOAD,
        "R2",
        Guards(
            may_open=lambda layer: may_open(layer) or layer is CompletionState.FAILED,
            may_publish=lambda layer: layer.is_final,
        ),
    ),
    Planted("the reader's stream does not wait", LOAD, "R2", Guards(may_run=lambda _: True)),
    Planted("tokens are published before done", LOAD, "R2", Guards(may_publish=lambda _: True)),
    Planted(
        "a page is sealed without verifying what it read",
        WRITE,
        "R2",
        Guards(may_seal=lambda _: True),
    ),
    Planted(
        "a closed lease forgets what it launched", LOAD, "R6", Guards(closes_after_last_use=False)
    ),
    Planted("an aborted writer forgets its step", STORE, "R6", Guards(closes_after_last_use=False)),
    Planted("the epoch is not bumped", LOAD, "R8", Guards(bumps_epoch=False)),
    # Pools.
    Planted("reclaim ignores blockers", LOAD, "R6", Guards(may_reclaim=lambda _: True)),
    Planted(
        "eviction ignores pins", LOAD, "R6", Guards(may_evict=lambda _, in_flight: not in_flight)
    ),
    Planted("eviction ignores pins and flights", LOAD, "R7", Guards(may_evict=lambda _, __: True)),
    Planted(
        "promised pages are given away",
        GRANT_BESIDE,
        "R11",
        Guards(may_promise=lambda free, _: free > 0),
    ),
    Planted(
        "a lost page does not wait for its copies", LOAD, "R6", Guards(lost_waits_for_copies=False)
    ),
    Planted(
        "a lost page does not wait for its readers",
        LOAD,
        "R6",
        Guards(lost_waits_for_readers=False),
    ),
    Planted(
        "a bad host page does not wait for other loads",
        TWO_LOADS,
        "R6",
        Guards(dropped_waits_for_loads=False),
    ),
    # Transfers.
    Planted(
        "the source is let go at the end", STORE, "R6", Guards(source_held_until_settled=False)
    ),
    Planted(
        "a running copy counts as settled",
        LOAD,
        "R6",
        Guards(is_settled=lambda whole, _: whole.is_final),
    ),
    Planted("a copy begins after the end", LOAD, "R6", Guards(may_begin=lambda _: True)),
    Planted("a transfer that is stuck has no deadline", LOAD, "R9", Guards(has_deadline=False)),
    Planted("readers of a lost load are not told", LOAD, "R9", Guards(lost_is_told=False)),
    Planted("the settling of a lost load is not told", LOAD, "R9", Guards(settling_is_told=False)),
    # Remote writers.
    Planted(
        "an expired grant's pages are used again",
        GRANT,
        "R6",
        Guards(grant_held_until_stopped=False),
    ),
    Planted(
        "a write under an expired grant's epochs is let in",
        GRANT,
        "R8",
        Guards(accepts=lambda is_open, same_peer, _: is_open and same_peer),
    ),
    Planted(
        "a write of the peer's older life is let in",
        GRANT,
        "R8",
        Guards(accepts=lambda is_open, _, same_epochs: is_open and same_epochs),
    ),
    Planted(
        "a dead peer's connection ends nothing", GRANT, "R9", Guards(connection_end_stops=False)
    ),
)
