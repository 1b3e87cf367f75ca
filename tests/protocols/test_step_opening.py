"""A step lease opened as a whole: for readers who know the memory of all layers already."""

from array import array
from collections.abc import Iterator

import pytest

from kvlease.errors import LeaseMoved, NotReady
from kvlease.protocols.ownership import SequenceLease, StepLease
from kvlease.protocols.ports import CompletionState
from kvlease.protocols.readiness import Openings
from kvlease.runtime.completions import CpuCompletion
from kvlease.units import LayerId, LeaseId

LAYERS = 4


class Load:
    """A transfer that is still filling every layer."""

    name, is_done = "load 1", False

    def __init__(self) -> None:
        self.completion = CpuCompletion("load 1")

    def layer_completion(self, layer: LayerId) -> CpuCompletion:
        return self.completion


def step_over(load: Load | None, log: Iterator[int]) -> StepLease:
    member = SequenceLease(LeaseId(1), array("i", [3]), 0, 0)
    if load is not None:
        member.pending.append(load)
    openings = Openings(lambda: next(log))
    return StepLease(LeaseId(2), [member], None, None, LAYERS, openings)  # type: ignore[arg-type]


def test_a_ready_step_is_opened_at_once_and_says_so_once() -> None:
    lease = step_over(None, iter([5, 5, 5, 6]))
    lease.open_all()
    lease.openings.note(LayerId(1))
    lease.open_all()
    assert lease.openings.runs == [(0, LAYERS, 5)]
    lease.openings.note(LayerId(1))  # something was written to the log meanwhile
    assert lease.openings.runs == [(0, LAYERS, 5), (1, 1, 6)]


def test_neighbours_fold_and_strangers_do_not() -> None:
    openings = Openings(lambda: 7)
    for first, count in ((0, 1), (1, 2), (2, 3), (8, 1)):
        openings.note(LayerId(first), count)
    assert openings.runs == [(0, 5, 7), (8, 1, 7)]


def test_a_step_whose_bytes_may_be_on_their_way_is_not() -> None:
    """Even once all have come: whether they have is asked layer by layer."""
    load = Load()
    lease = step_over(load, iter([]))
    with pytest.raises(NotReady, match="still being filled"):
        lease.open_all()
    load.completion.set_recorded()
    assert load.completion.state is CompletionState.RECORDED
    with pytest.raises(NotReady, match="still being filled"):
        lease.open_all()
    assert not lease.openings.runs


def test_a_step_that_has_ended_is_not() -> None:
    lease = step_over(None, iter([]))
    lease.close()
    with pytest.raises(LeaseMoved, match="has ended"):
        lease.open_all()
