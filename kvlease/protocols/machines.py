"""The life of a page and of a transfer's completions, as pure transition functions.

Pools and the runtime step these machines and nothing else decides what may follow what, so the
rules can be explored exhaustively without a device. An event that the table lacks raises
IllegalTransition.
"""

from enum import Enum

import msgspec

from kvlease.errors import IllegalTransition
from kvlease.protocols.ports import CompletionState


class PageState(Enum):
    """Where a page stands. Promises (reservations) are counts of free pages, not states of one."""

    FREE = "free"
    EXCLUSIVE = "exclusive"
    """One holder, who may write: a running sequence's own page, or a transfer's destination."""
    SEALED = "sealed"
    """Immutable and in the index; the ledger calls it leased while anyone pins it, else cached."""
    QUARANTINED = "quarantined"

    __hash__ = object.__hash__  # Enum's own costs more than the rest of a step


class PageEvent(Enum):
    """What can happen to a page."""

    ACQUIRE = "acquire"
    SEAL = "seal"
    RELEASE = "release"
    RECLAIM = "reclaim"

    __hash__ = object.__hash__


_PAGE: dict[tuple[PageState, PageEvent], PageState] = {
    (PageState.FREE, PageEvent.ACQUIRE): PageState.EXCLUSIVE,
    (PageState.EXCLUSIVE, PageEvent.SEAL): PageState.SEALED,
    (PageState.EXCLUSIVE, PageEvent.RELEASE): PageState.QUARANTINED,
    (PageState.SEALED, PageEvent.RELEASE): PageState.QUARANTINED,
    (PageState.QUARANTINED, PageEvent.RECLAIM): PageState.FREE,
}

_KEEPS = {
    PageEvent.ACQUIRE: "R3",
    PageEvent.SEAL: "R4",
    PageEvent.RELEASE: "R6",
    PageEvent.RECLAIM: "R6",
}
"""The rule that a step would break which the table does not have."""


def step_page(state: PageState, event: PageEvent) -> PageState:
    """Return the state after the event; raise IllegalTransition when there is none.

    There is no way from sealed back to exclusive (R4), and none to free but through quarantine
    (R6).
    """
    after = _PAGE.get((state, event))
    if after is None:
        raise IllegalTransition(f"a page that is {state.value} cannot {event.value}", _KEEPS[event])
    return after


class CopyEvent(Enum):
    """What can happen to one completion of a transfer."""

    RECORD = "record"
    FINISH = "finish"
    FAIL = "fail"
    REVOKE = "revoke"


class Copy(msgspec.Struct, frozen=True, gc=False):
    """One completion: planned bytes, bytes done, and where it stands."""

    planned_nbytes: int
    done_nbytes: int = 0
    state: CompletionState = CompletionState.PLANNED


def step_copy(copy: Copy, event: CopyEvent, nbytes: int = 0) -> Copy:
    """Return the completion after the event.

    FINISH with fewer bytes than planned ends FAILED, never DONE (R5). FINISH straight from PLANNED
    is illegal: work nobody recorded cannot have ended (R2). Raises IllegalTransition.
    """
    if copy.state.is_final:
        raise IllegalTransition(
            f"a completion that is {copy.state.value} cannot {event.value}", "R9"
        )
    match event:
        case CopyEvent.RECORD:
            if copy.state is not CompletionState.PLANNED:
                raise IllegalTransition("a completion is recorded once", "R2")
            return Copy(copy.planned_nbytes, 0, CompletionState.RECORDED)
        case CopyEvent.FINISH:
            if copy.state is not CompletionState.RECORDED:
                raise IllegalTransition("a completion that was never recorded cannot finish", "R2")
            whole = nbytes == copy.planned_nbytes
            end = CompletionState.DONE if whole else CompletionState.FAILED
            return Copy(copy.planned_nbytes, nbytes, end)
        case CopyEvent.FAIL:
            return Copy(copy.planned_nbytes, nbytes, CompletionState.FAILED)
        case CopyEvent.REVOKE:
            return Copy(copy.planned_nbytes, nbytes, CompletionState.REVOKED)


def joint_state(parts: "list[Copy]") -> CompletionState:
    """Return where a layer stands, given its components: ready only when all are.

    No components at all is FAILED: an empty completion never passes for a finished one.
    """
    states = {part.state for part in parts}
    for bad in (CompletionState.FAILED, CompletionState.REVOKED):
        if bad in states:
            return bad
    if not states:
        return CompletionState.FAILED
    if states == {CompletionState.DONE}:
        return CompletionState.DONE
    if CompletionState.PLANNED in states:
        return CompletionState.PLANNED
    return CompletionState.RECORDED
