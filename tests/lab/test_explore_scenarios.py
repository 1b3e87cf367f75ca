"""The scenarios are clean as the runtime stands, and find guards that were taken away."""

from array import array
from collections.abc import Callable, Iterable

import pytest

from kvlease.errors import DeadlineExceeded
from kvlease.pools.held import Held
from kvlease.pools.page_book import Blocker, PageBook
from kvlease.pools.prefix_results import Match
from kvlease.protocols.readiness import Readiness
from kvlease.runtime.admission import Admission
from kvlease.runtime.estimates import Choice
from kvlease.runtime.scheduler import Scheduler
from kvlease.runtime.sequence import Sequence
from kvlease.runtime.settlement import Settlement
from kvlease.runtime.transfer import Transfer
from kvlease.services.lab.explore import explore, run_once
from kvlease.services.lab.scenarios import SCENARIOS
from kvlease.services.lab.schedule import Replay
from kvlease.units import RequestId
from tests.conftest import ExploreSchedules

Plant = Callable[[pytest.MonkeyPatch], None]
Recorder = Callable[[str, object], None]


def free_without_blockers(patch: pytest.MonkeyPatch) -> None:
    """R6: released pages, tails and rings go free although a copy may still write them."""
    release = PageBook.release

    def careless(self: PageBook, pages: "array[int]", _: Iterable[Blocker] = ()) -> None:
        release(self, pages)

    patch.setattr(PageBook, "release", careless)


def resolve_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """R1, R2: a layer opens whatever has become of the transfers that fill it."""

    async def settle(*_: object) -> None:
        pass

    patch.setattr(Readiness, "settle", settle)


def sharer_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """R1: a second reader of a page in flight takes it for one that has arrived."""
    start = Admission._start

    def careless(self: Admission, seq: Sequence, held: Held, match: Match, choice: Choice) -> None:
        held.arrivals[:] = [one for one in held.arrivals if one is held.load]
        start(self, seq, held, match, choice)

    patch.setattr(Admission, "_start", careless)


def sharer_misses_the_loss(patch: pytest.MonkeyPatch) -> None:
    """R9: a load that failed restarts the request that had planned it, and no other."""
    ended = Settlement.transfer_ended

    def careless(self: Settlement, transfer: Transfer) -> None:
        planned = self._core.planned[transfer.plan.id]
        for seq in self._core.running:
            held = seq.held
            if held is not None and held.load is not planned and planned in held.arrivals:
                held.arrivals.remove(planned)
                held.lease.pending.remove(transfer)
        ended(self, transfer)

    patch.setattr(Settlement, "transfer_ended", careless)


def cancelled_pages_go_at_once(patch: pytest.MonkeyPatch) -> None:
    """R6: a cancelled request's pages are released while the step that writes them runs."""
    end_early = Scheduler._end_early

    def careless(
        self: Scheduler, request: RequestId, reason: str, error: DeadlineExceeded | None
    ) -> None:
        seq = self._by_request.get(request)
        if seq is not None and seq.in_step and seq.held is not None:
            self._core.pool.memory.device.release(seq.held.owned)
            seq.held.owned = array("i")
        end_early(self, request, reason, error)

    patch.setattr(Scheduler, "_end_early", careless)


def nobody_is_preempted(patch: pytest.MonkeyPatch) -> None:
    """R9: requests that wait for each other's pages wait until their deadlines."""
    patch.setattr(Scheduler, "_is_stuck", lambda _self: False)


def joins_the_dead_load(patch: pytest.MonkeyPatch) -> None:
    """R9: a step that a load has failed starts over before the loader's word of it has come."""
    patch.setattr(Settlement, "_notice_losses", lambda _self, _seq: None)


PLANTS: dict[str, tuple[str, Plant, bool]] = {
    "free without blockers": ("abort", free_without_blockers, True),
    "resolve without waiting": ("pressure", resolve_without_waiting, True),
    "sharer does not wait": ("shared", sharer_does_not_wait, True),
    "sharer misses the loss": ("shared", sharer_misses_the_loss, False),
    "cancelled pages go at once": ("abort", cancelled_pages_go_at_once, True),
    "nobody is preempted": ("preempt", nobody_is_preempted, True),
    "joins the dead load": ("shared", joins_the_dead_load, False),
}
"""Where each is looked for, and whether few enough schedules do for every run of the suite."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_runtime_stands_every_schedule(name: str, explore_schedules: ExploreSchedules) -> None:
    """Issue 3: 10,000 schedules of the scenarios find nothing (with --full)."""
    result = explore_schedules(SCENARIOS[name])
    assert result.distinct > 0.9 * result.schedules, "schedules differ"


@pytest.mark.parametrize("name", PLANTS)
def test_a_guard_that_is_taken_away_is_missed(
    name: str, monkeypatch: pytest.MonkeyPatch, is_full: bool, record_property: Recorder
) -> None:
    """Issue 3: a planted bug is found within 2,000 schedules, and its failure replays."""
    scenario, plant, is_quick = PLANTS[name]
    if not (is_quick or is_full):
        pytest.skip("needs some hundred schedules; run with --full")
    plant(monkeypatch)
    found = explore(SCENARIOS[scenario], seeds=range(2000), shrink_runs=300 if is_full else 20)
    record_property("counted", f"{name}: found by {scenario} after {found.schedules} schedules")
    (failure,) = found.failures
    assert failure.replays
    again = run_once(SCENARIOS[scenario], failure.seed, Replay(failure.choices))
    assert again.problem == failure.problem
    monkeypatch.undo()
    clean = run_once(SCENARIOS[scenario], failure.seed, Replay(failure.choices))
    assert clean.problem is None, "with the guard in place the same run is well"
