"""The page book: conservation, quarantine, generations; a naive model runs beside it."""

from array import array

import pytest
from attrs import define
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlease.errors import LedgerImbalance, PagesUnavailable, UsageError
from kvlease.pools.page_book import PageBook, Reservation


@define(eq=False)
class Work:
    """Something that may still touch pages."""

    id: int = 1
    kind: str = "load"
    is_settled: bool = False


def test_released_is_not_free_while_a_copy_may_write() -> None:
    """R6: reuse before the last writer is done garbles somebody else's answer (K019)."""
    book, work = PageBook("pages", 4), Work()
    pages = book.acquire(4)
    book.release(pages, [work])
    assert book.available == 0
    with pytest.raises(PagesUnavailable, match="1 pages wanted, 0 of 4 available"):
        book.acquire(1)
    assert book.reclaim() == 0
    work.is_settled = True
    assert book.reclaim() == 4
    assert book.available == 4


@pytest.mark.parametrize("stranger", [-1, 4])
def test_a_page_that_there_is_not_changes_nothing(stranger: int) -> None:
    """-1 names the last page to Python, and a page of nobody's to us."""
    book = PageBook("pages", 4)
    pages = book.acquire(4)
    before = book.ledger()
    with pytest.raises(LedgerImbalance, match="numbered 0 to 3"):
        book.release(array("i", [*pages[:3], stranger]))
    assert book.ledger() == before
    book.release(pages)


def test_double_free_is_caught_and_changes_nothing() -> None:
    """A page freed twice would be handed to two owners."""
    book = PageBook("pages", 4)
    pages = book.acquire(2)
    book.release(pages)
    held = book.acquire(1)
    before = book.ledger()
    with pytest.raises(LedgerImbalance, match="cannot release"):
        book.release(array("i", [page for page in pages if page not in held]))
    with pytest.raises(LedgerImbalance, match="twice"):
        book.release(held + held)
    assert book.ledger() == before
    book.release(held)


def test_pages_of_two_states_do_not_move_together() -> None:
    """All or none: a half-moved call would leave the ledger wrong."""
    book = PageBook("pages", 4)
    held, sealed = book.acquire(1), book.acquire(1)
    book.seal(sealed)
    before = book.ledger()
    with pytest.raises(LedgerImbalance, match="two states"):
        book.release(held + sealed)
    assert book.ledger() == before


def test_a_stale_reference_is_refused_and_counted() -> None:
    """R8: the generation ends with the release, before anyone reuses the page."""
    book = PageBook("pages", 2)
    page = book.acquire(1)[0]
    epoch = book.epochs[page]
    assert book.is_current(page, epoch)
    book.release(array("i", [page]))
    assert not book.is_current(page, epoch)
    assert book.stale_refusals == 1


def test_a_promise_is_kept_and_the_rest_comes_back() -> None:
    """Asking before doing: promised pages are not given to others."""
    book = PageBook("pages", 4)
    promise = book.reserve(3)
    with pytest.raises(PagesUnavailable):
        book.acquire(2)
    assert len(book.take(promise, 2)) == 2
    with pytest.raises(UsageError, match="cannot give"):
        book.take(promise, 2)
    book.forfeit(promise)
    book.forfeit(promise)
    assert book.available == 2
    assert book.ledger().is_balanced


class BookMachine(RuleBasedStateMachine):
    """Random legal histories beside plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.book = PageBook("pages", 12)
        self.held: list[int] = []
        self.sealed: list[int] = []
        self.waiting: list[tuple[Work, list[int]]] = []
        self.promises: list[Reservation] = []

    @rule(count=st.integers(1, 5))
    def reserve(self, count: int) -> None:
        if count <= self.book.available:
            self.promises.append(self.book.reserve(count))
        else:
            with pytest.raises(PagesUnavailable):
                self.book.reserve(count)

    @precondition(lambda self: self.promises)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        promise = self.promises[-1]
        self.held += self.book.take(promise, data.draw(st.integers(0, promise.remaining)))

    @precondition(lambda self: self.promises)
    @rule()
    def forfeit(self) -> None:
        self.book.forfeit(self.promises.pop())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.held)))
        chosen, self.held = self.held[:count], self.held[count:]
        self.book.seal(array("i", chosen))
        self.sealed += chosen

    @precondition(lambda self: self.sealed or self.held)
    @rule(settled=st.booleans(), from_sealed=st.booleans())
    def release(self, settled: bool, from_sealed: bool) -> None:
        source = self.sealed if from_sealed else self.held
        if not source:
            return
        chosen = source[: (len(source) + 1) // 2]
        del source[: len(chosen)]
        work = Work(is_settled=settled)
        self.book.release(array("i", chosen), [work])
        if not settled:
            self.waiting.append((work, chosen))

    @precondition(lambda self: self.waiting)
    @rule()
    def settle(self) -> None:
        work, pages = self.waiting.pop(0)
        work.is_settled = True
        assert self.book.reclaim() == len(pages)

    @invariant()
    def counts_agree(self) -> None:
        self.book.check(self.held, self.sealed)
        ledger = self.book.ledger()
        assert ledger.held == len(self.held)
        assert ledger.sealed == len(self.sealed)
        assert ledger.quarantined == sum(len(pages) for _, pages in self.waiting)
        assert ledger.reserved == sum(promise.remaining for promise in self.promises)


BookMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBookMachine = BookMachine.TestCase
