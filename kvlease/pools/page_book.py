"""Who has each page of one tier: free, promised, held, or waiting for its last user.

The book hands out page ids and takes them back; it owns no memory. A released page goes through
quarantine and leaves it only when everything that may still touch it has settled (R6). Slots of
sequence state and of kept tails are booked the same way.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Protocol, final

from attrs import frozen

from kvlease.errors import IllegalTransition, LedgerImbalance, PagesUnavailable, UsageError
from kvlease.protocols.event_base import EventSink, Tier, runs_of
from kvlease.protocols.event_pages import PageFree, PageQuarantine
from kvlease.protocols.machines import PageEvent, PageState, step_page


class Blocker(Protocol):
    """Work that may still touch pages: a transfer, a step, a lease, or a remote writer."""

    @property
    def kind(self) -> str:
        """``step``, ``lease``, or what kind of transfer it is; for the log."""
        ...

    @property
    def id(self) -> int:
        """Its number among its kind, for the log."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether the work has really ended, successfully or not."""
        ...


_STATES = tuple(PageState)
_CODE = {state: code for code, state in enumerate(_STATES)}
"""A page's state is kept as one byte: its place in the machine's list of states."""


@frozen
class Ledger:
    """Pages of one book, each counted once; the columns add up to ``total`` (R11).

    ``held`` pages have one exclusive holder, ``sealed`` ones belong to the prefix index.
    """

    total: int
    free: int
    reserved: int
    held: int
    sealed: int
    quarantined: int

    @property
    def is_balanced(self) -> bool:
        """Whether the columns add up."""
        parts = self.free + self.reserved + self.held + self.sealed + self.quarantined
        return parts == self.total


@final
class Reservation:
    """A promise of pages not yet named; taken one by one, and the rest forfeited."""

    __slots__ = ("remaining",)

    def __init__(self, remaining: int) -> None:
        """Called by the book only."""
        self.remaining = remaining


@final
class PageBook:
    """Allocator of ``total`` pages with generations, reservations and a quarantine.

    Every misuse (a double free, releasing a page that is not held) raises LedgerImbalance and
    changes nothing.
    """

    def __init__(
        self, name: str, total: int, sink: EventSink | None = None, tier: Tier = "device"
    ) -> None:
        """Start with every page free; ``name`` is used in errors, ``sink`` hears of pages."""
        self.name = name
        self.total = total
        self._sink = sink
        self._tier: Tier = tier
        self.epochs = array("q", bytes(8 * total))
        self._state = bytearray(total)
        self._free = array("i", range(total - 1, -1, -1))
        self._reserved = 0
        self._count = [total, 0, 0, 0]
        self._quarantine: list[tuple[array[int], tuple[Blocker, ...]]] = []
        self.stale_refusals = 0

    @property
    def available(self) -> int:
        """Pages that are free and not promised."""
        return len(self._free) - self._reserved

    def reserve(self, num_pages: int) -> Reservation:
        """Promise pages; raises PagesUnavailable when fewer are available. Returns the promise."""
        if num_pages > self.available:
            raise PagesUnavailable(
                f"{self.name}: {num_pages} pages wanted, {self.available} of {self.total} available"
            )
        self._reserved += num_pages
        return Reservation(num_pages)

    def take(
        self, reservation: Reservation, num_pages: int, *, sealed: bool = False
    ) -> "array[int]":
        """Turn part of a promise into held pages, or into ``sealed`` ones; returns their ids."""
        if num_pages > reservation.remaining:
            raise UsageError(
                f"{self.name}: a reservation of {reservation.remaining} pages cannot give"
                f" {num_pages}; reserve more first",
                "R11",
            )
        reservation.remaining -= num_pages
        self._reserved -= num_pages
        events = (PageEvent.ACQUIRE, PageEvent.SEAL) if sealed else (PageEvent.ACQUIRE,)
        return self._hand_out(num_pages, events)

    def forfeit(self, reservation: Reservation) -> None:
        """Give back what is left of a promise; may be called twice."""
        self._reserved -= reservation.remaining
        reservation.remaining = 0

    def acquire(self, num_pages: int, *, sealed: bool = False) -> "array[int]":
        """Reserve and take in one call; raises PagesUnavailable. Returns held or sealed pages."""
        return self.take(self.reserve(num_pages), num_pages, sealed=sealed)

    def _hand_out(self, num_pages: int, events: tuple[PageEvent, ...]) -> "array[int]":
        if num_pages == 0:
            return array("i")
        pages = self._free[-num_pages:]
        pages.reverse()  # ascending where possible: fewer runs in logs and copies
        del self._free[-num_pages:]
        self._move(pages, *events)
        return pages

    def seal(self, pages: "array[int]") -> None:
        """Pass held pages to the prefix index: from now on they are shared and never written."""
        self._move(pages, PageEvent.SEAL)

    def release(self, pages: "array[int]", blockers: Iterable[Blocker] = ()) -> None:
        """Take pages back into quarantine until every blocker has settled (R6). Takes the ids."""
        if not pages:
            return
        self._move(pages, PageEvent.RELEASE)
        for page in pages:
            self.epochs[page] += 1
        waiting = tuple(blocker for blocker in blockers if not blocker.is_settled)
        if not waiting:
            self._free_now(pages)
            return
        self._quarantine.append((pages, waiting))
        if self._sink is not None and self._sink.audit:
            self._sink.emit(
                PageQuarantine(
                    pages=self._ended(pages),
                    tier=self._tier,
                    transfers=[b.id for b in waiting if b.kind not in ("step", "lease")],
                    steps=[blocker.id for blocker in waiting if blocker.kind == "step"],
                    leases=[blocker.id for blocker in waiting if blocker.kind == "lease"],
                )
            )

    def reclaim(self) -> int:
        """Free quarantined pages whose blockers have all settled; returns how many."""
        if not self._quarantine:
            return 0
        kept: list[tuple[array[int], tuple[Blocker, ...]]] = []
        freed = 0
        for pages, blockers in self._quarantine:
            waiting = tuple(blocker for blocker in blockers if not blocker.is_settled)
            if waiting:
                kept.append((pages, waiting))
            else:
                self._free_now(pages)
                freed += len(pages)
        self._quarantine = kept
        return freed

    def _free_now(self, pages: "array[int]") -> None:
        self._move(pages, PageEvent.RECLAIM)
        self._free.extend(reversed(pages))
        if self._sink is not None and self._sink.audit:
            self._sink.emit(PageFree(pages=self._ended(pages), tier=self._tier))

    def _ended(self, pages: "array[int]") -> list[tuple[int, int, int]]:
        """Runs with the generation that ended when the pages were released."""
        return runs_of(pages, [self.epochs[page] - 1 for page in pages])

    def runs(self, pages: "array[int]") -> list[tuple[int, int, int]]:
        """Fold pages into runs of their present generation, for the log."""
        epochs = self.epochs
        return runs_of(pages, [epochs[page] for page in pages])

    def _move(self, pages: "array[int]", *events: PageEvent) -> None:
        """Step all pages or none through the page machine."""
        if not pages:
            return
        state = self._state
        if min(pages) < 0 or max(pages) >= len(state):
            raise LedgerImbalance(f"{self.name}: pages are numbered 0 to {len(state) - 1}")
        before = state[pages[0]]
        try:
            after = _CODE[reduce(step_page, events, _STATES[before])]
        except IllegalTransition as error:
            raise LedgerImbalance(f"{self.name}: page {pages[0]}: {error}", error.rule) from None
        moved = 0
        for page in pages:
            if state[page] != before:
                break
            state[page] = after
            moved += 1
        if moved < len(pages):
            for page in pages[:moved]:
                state[page] = before
            raise self._odd(pages, moved)
        self._count[before] -= len(pages)
        self._count[after] += len(pages)

    def _odd(self, pages: "array[int]", place: int) -> LedgerImbalance:
        """Say why a page cannot go with those before it."""
        page, first = pages[place], pages[0]
        if page in pages[:place]:
            return LedgerImbalance(f"{self.name}: a page is named twice in one call")
        states = _STATES[self._state[page]].value, _STATES[self._state[first]].value
        return LedgerImbalance(
            f"{self.name}: page {page} is {states[0]} and page {first} {states[1]}; pages of two"
            " states moved in one call"
        )

    def is_current(self, page: int, epoch: int) -> bool:
        """Whether a reference is of the page's present generation; counts refusals (R8)."""
        current = self.epochs[page] == epoch
        self.stale_refusals += not current
        return current

    def ledger(self) -> Ledger:
        """Return the counts kept so far; constant time."""
        free, held, sealed, quarantined = self._count
        return Ledger(self.total, free - self._reserved, self._reserved, held, sealed, quarantined)

    def check(self, held: Sequence[int], sealed: Sequence[int]) -> None:
        """Recount everything against what the holders say; raises LedgerImbalance on a mismatch.

        ``held`` and ``sealed`` list every page the caller knows of in each state, in any order.
        """
        for name, listed in (("exclusive", held), ("sealed", sealed)):
            wanted = _CODE[PageState(name)]
            booked = {page for page, state in enumerate(self._state) if state == wanted}
            if len(listed) != len(set(listed)):
                raise LedgerImbalance(f"{self.name}: a {name} page is listed twice")
            if set(listed) != booked:
                odd = sorted(set(listed) ^ booked)[:8]
                raise LedgerImbalance(f"{self.name}: {name} pages disagree with holders: {odd}")
        listed_free = set(self._free)
        quarantined = [page for pages, _ in self._quarantine for page in pages]
        whole = len(listed_free) + len(quarantined) + len(held) + len(sealed)
        if whole != self.total or len(listed_free) != len(self._free):
            raise LedgerImbalance(f"{self.name}: {whole} pages found of {self.total}")
        if not self.ledger().is_balanced:
            raise LedgerImbalance(f"{self.name}: columns do not add up: {self.ledger()}")
