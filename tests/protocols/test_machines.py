"""Every transition of the page and the copy machine, legal and illegal."""

import itertools

import pytest

from kvlease.errors import IllegalTransition
from kvlease.protocols.machines import (
    Copy,
    CopyEvent,
    PageEvent,
    PageState,
    joint_state,
    step_copy,
    step_page,
)
from kvlease.protocols.ports import CompletionState

PAGE_TABLE = {
    (PageState.FREE, PageEvent.ACQUIRE): PageState.EXCLUSIVE,
    (PageState.EXCLUSIVE, PageEvent.SEAL): PageState.SEALED,
    (PageState.EXCLUSIVE, PageEvent.RELEASE): PageState.QUARANTINED,
    (PageState.SEALED, PageEvent.RELEASE): PageState.QUARANTINED,
    (PageState.QUARANTINED, PageEvent.RECLAIM): PageState.FREE,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PageState, PageEvent)))
def test_page_table_is_exactly_this(state: PageState, event: PageEvent) -> None:
    """A transition too many is a page reused early or a sealed page written."""
    if (state, event) in PAGE_TABLE:
        assert step_page(state, event) is PAGE_TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"{state.value} cannot {event.value}"):
            step_page(state, event)


def test_a_released_page_is_not_free() -> None:
    """R6: the only way to free is through quarantine."""
    ways = [event for event in PageEvent if PAGE_TABLE.get((PageState.SEALED, event))]
    assert ways == [PageEvent.RELEASE]
    assert {s for (s, _), after in PAGE_TABLE.items() if after is PageState.FREE} == {
        PageState.QUARANTINED
    }


def test_a_copy_finishes_only_after_it_was_recorded() -> None:
    """R2: work that nobody recorded is not a wait that passes."""
    with pytest.raises(IllegalTransition, match="never recorded"):
        step_copy(Copy(8), CopyEvent.FINISH, 8)


@pytest.mark.parametrize("nbytes", [0, 7, 9])
def test_other_bytes_than_planned_are_failed(nbytes: int) -> None:
    """R5: a short copy, and a long one, are FAILED, never DONE."""
    recorded = step_copy(Copy(8), CopyEvent.RECORD)
    assert step_copy(recorded, CopyEvent.FINISH, nbytes).state is CompletionState.FAILED
    assert step_copy(recorded, CopyEvent.FINISH, 8).state is CompletionState.DONE


@pytest.mark.parametrize("event", list(CopyEvent))
@pytest.mark.parametrize(
    "end", [CompletionState.DONE, CompletionState.FAILED, CompletionState.REVOKED]
)
def test_an_end_is_final(event: CopyEvent, end: CompletionState) -> None:
    """Each completion has one terminal result."""
    with pytest.raises(IllegalTransition):
        step_copy(Copy(8, 8, end), event, 8)


@pytest.mark.parametrize("event", [CopyEvent.FAIL, CopyEvent.REVOKE])
def test_failing_and_revoking_work_from_anywhere_before_the_end(event: CopyEvent) -> None:
    """R9: everything can end."""
    for copy in (Copy(8), step_copy(Copy(8), CopyEvent.RECORD)):
        assert step_copy(copy, event).state.is_final


def test_a_copy_is_recorded_once() -> None:
    """A second record would hide which work is meant."""
    recorded = step_copy(Copy(8), CopyEvent.RECORD)
    with pytest.raises(IllegalTransition, match="once"):
        step_copy(recorded, CopyEvent.RECORD)


def test_a_layer_is_as_ready_as_its_least_ready_component() -> None:
    """A layer is ready when all its components are; an empty layer is an error, not ready."""
    of = {state: Copy(1, 1, state) for state in CompletionState}
    order = [CompletionState.PLANNED, CompletionState.RECORDED, CompletionState.DONE]
    for left, right in itertools.product(order, order):
        expected = min(left, right, key=order.index)
        assert joint_state([of[left], of[right]]) is expected
    for bad in (CompletionState.FAILED, CompletionState.REVOKED):
        for other in order:
            assert joint_state([of[other], of[bad]]) is bad
    assert joint_state([]) is CompletionState.FAILED
