"""One tier's pages as a log tells of them: flat arrays, changed and compared a run at a time.

A million pages are a few arrays and no objects. This module does not know the rules.
"""

from typing import Final, final

from kvlease.protocols.events import PageRun

FREE, HELD, SEALED, QUARANTINED, UNKNOWN = range(5)
STATE_NAMES = ("free", "held", "sealed", "quarantined", "unknown")
MAX_PAGES = 1 << 22
"""Pages of a tier whose size the head does not state are believed up to here."""

NO_RUNS: Final[list[PageRun]] = []
"""No run; shared and never changed."""

_UP = bytes([*range(1, 256), 255])
_DOWN = bytes([0, *range(255)])
FULL = 255
"""Pins of one page that its byte counts; more are counted beside it."""
_ONE_OF = [bytearray((state,)) for state in range(5)]
"""Assigned to a slice; bytes would be copied into one of these first, at four times the time."""
_IS_PINNED = bytes([0] + [1] * 255)
_MAY_BE_LEASED = bytes(state in (HELD, SEALED) for state in range(256))


@final
class Pins:
    """How many open leases name each page: one byte a page, the rare rest in a dict.

    Runs of any length are counted up and down by translating their bytes in one call.
    """

    __slots__ = ("beyond", "counts")

    def __init__(self, total: int) -> None:
        """Start with no page pinned."""
        self.counts = bytearray(total)
        self.beyond: dict[int, int] = {}

    def up(self, runs: list[PageRun]) -> None:
        """One more lease names these pages, all of which exist."""
        counts = self.counts
        for first, count, _ in runs:
            if count == 1:
                if (known := counts[first]) < FULL:
                    counts[first] = known + 1
                    continue
            elif FULL not in (part := counts[first : first + count]):
                counts[first : first + count] = part.translate(_UP)
                continue
            for page in range(first, first + count):
                if counts[page] == FULL:
                    self.beyond[page] = self.beyond.get(page, 0) + 1
                else:
                    counts[page] += 1

    def down(self, runs: list[PageRun]) -> None:
        """One lease less names them; a page that none names stays at zero."""
        counts = self.counts
        for first, count, _ in runs:
            if count == 1:
                if (known := counts[first]) < FULL:
                    counts[first] = _DOWN[known]
                    continue
            elif FULL not in (part := counts[first : first + count]):
                counts[first : first + count] = part.translate(_DOWN)
                continue
            self._down(first, count)

    def down_each(self, pages: list[int]) -> None:
        """One lease less names each of these pages."""
        counts = self.counts
        for page in pages:
            if (known := counts[page]) < FULL:
                counts[page] = _DOWN[known]
            else:
                self._down(page, 1)

    def _down(self, first: int, count: int) -> None:
        for page in range(first, first + count):
            more = self.beyond.get(page, 0)
            if more:
                self.beyond[page] = more - 1
            elif self.counts[page]:
                self.counts[page] -= 1

    def are_free(self, first: int, count: int) -> bool:
        """Whether no open lease names any of these pages."""
        return self.counts.count(0, first, first + count) == count


@final
class Pages:
    """State, epoch and history of every page of one tier.

    Attributes:
        holders: the lease of a held page; the number of the quarantine of a quarantined one.
        places: the position, in its sequence, of a sealed page's first token; -1 if not known.
        roots: number of the cache identity it was sealed under.
        is_mixed: whether there is more than one identity; ``roots`` are all 0 before.
        since: ``seq`` of the event that brought the page into its state.
        unlanded: pages sealed by a transfer whose bytes have not landed yet, with its number.
    """

    __slots__ = (
        "epochs", "holders", "is_mixed", "is_sized", "name", "pins", "places", "roots", "since",
        "state", "total", "unlanded",
    )  # fmt: skip

    def __init__(self, name: str, total: int | None) -> None:
        """Start with all pages free; None where the head does not state how many there are."""
        self.name = name
        self.is_sized = total is not None
        self.is_mixed = False
        self.total = 0
        self.state = bytearray()
        self.pins = Pins(0)
        self.epochs: list[int] = []
        self.holders: list[int] = []
        self.places: list[int] = []
        self.roots: list[int] = []
        self.since: list[int] = []
        self.unlanded: dict[int, int] = {}
        self.grow(total or 0)

    def grow(self, total: int) -> None:
        """Know of so many pages."""
        more = total - self.total
        self.total = total
        self.state.extend(bytes(more))
        self.pins.counts.extend(bytes(more))
        for column in (self.epochs, self.holders, self.roots, self.since):
            column.extend([0] * more)
        self.places.extend([-1] * more)

    def has(self, first: int, count: int) -> bool:
        """Whether these pages exist, growing a tier of unstated size to hold them."""
        end = first + count
        if first < 0 or count < 1:
            return False
        if end > self.total and not self.is_sized and end <= MAX_PAGES:
            self.grow(end)
        return end <= self.total

    def are(self, first: int, count: int, epoch: int, state: int) -> bool:
        """Whether all pages of a run are of this epoch and in this state."""
        end = first + count
        if count == 1:
            return (
                0 <= first < self.total
                and self.state[first] == state
                and self.epochs[first] == epoch
            )
        return (
            first >= 0
            and count > 0
            and end <= self.total
            and self.state.count(state, first, end) == count
            and self.epochs[first:end].count(epoch) == count
        )

    def odd(self, runs: list[PageRun], state: int) -> list[PageRun]:
        """Return those runs whose pages are not all of their epoch and in this state."""
        states, epochs, total = self.state, self.epochs, self.total
        odd = NO_RUNS
        for run in runs:
            first, count, epoch = run
            if (
                count == 1
                and first >= 0
                and first < total
                and states[first] == state
                and epochs[first] == epoch
            ):
                continue
            if not self.are(first, count, epoch, state):
                odd = [*odd, run]
        return odd

    def pin_sealed(self, runs: list[PageRun]) -> list[PageRun]:
        """One more lease names these pages; return runs, not pinned, that are not all sealed."""
        states, epochs, counts, total = self.state, self.epochs, self.pins.counts, self.total
        odd = NO_RUNS
        for run in runs:
            first, count, epoch = run
            if (
                count == 1
                and first >= 0
                and first < total
                and states[first] == SEALED
                and epochs[first] == epoch
            ):
                if (known := counts[first]) < FULL:
                    counts[first] = known + 1
                else:
                    self.pins.up([run])
            elif count > 1 and self.are(first, count, epoch, SEALED):
                if FULL in (part := counts[first : first + count]):
                    self.pins.up([run])
                else:
                    counts[first : first + count] = part.translate(_UP)
            else:
                odd = [*odd, run]
        return odd

    def reserve(self, runs: list[PageRun], lease: int, seq: int) -> list[PageRun]:
        """Give free pages to a lease, which pins them; return runs, not given, of others."""
        states, epochs, counts, total = self.state, self.epochs, self.pins.counts, self.total
        holders, since, odd = self.holders, self.since, NO_RUNS
        for run in runs:
            first, count, epoch = run
            if (
                count == 1
                and first >= 0
                and first < total
                and states[first] == FREE
                and epochs[first] == epoch
            ):
                if (known := counts[first]) < FULL:
                    counts[first] = known + 1
                else:
                    self.pins.up([run])
                states[first] = HELD
                holders[first] = lease
                since[first] = seq
            elif count > 1 and self.are(first, count, epoch, FREE):
                self.pins.up([run])
                self.move(run, HELD, lease, seq)
            else:
                odd = [*odd, run]
        return odd

    def seal(self, runs: list[PageRun], lease: int, seq: int) -> list[PageRun]:
        """Seal pages that a lease holds; return runs, not sealed, that it does not hold."""
        states, epochs, holders, total = self.state, self.epochs, self.holders, self.total
        since, odd = self.since, NO_RUNS
        for run in runs:
            first, count, epoch = run
            if (
                count == 1
                and first >= 0
                and first < total
                and states[first] == HELD
                and epochs[first] == epoch
                and holders[first] == lease
            ):
                states[first] = SEALED
                since[first] = seq
            elif count > 1 and self.is_held_by(run, lease):
                self.move(run, SEALED, 0, seq)
            else:
                odd = [*odd, run]
        return odd

    def free(self, runs: list[PageRun], seq: int) -> list[PageRun]:
        """Free held or sealed pages that no lease pins; return runs, not freed, of others."""
        states, epochs, counts, total = self.state, self.epochs, self.pins.counts, self.total
        odd, since = NO_RUNS, self.since
        for run in runs:
            first, count, epoch = run
            if (
                count == 1
                and first >= 0
                and first < total
                and (states[first] == SEALED or states[first] == HELD)
                and epochs[first] == epoch
                and not counts[first]
            ):
                states[first] = FREE
                epochs[first] = epoch + 1
                since[first] = seq
            elif (
                count > 1
                and self.pins.are_free(first, count)
                and (self.are(first, count, epoch, SEALED) or self.are(first, count, epoch, HELD))
            ):
                self.release(run, FREE, 0, seq)
            else:
                odd = [*odd, run]
        return odd

    def move(self, run: PageRun, state: int, holder: int, seq: int) -> None:
        """Bring a run's pages, all of which exist, into a state."""
        first, count, _ = run
        end = first + count
        self.state[first:end] = _ONE_OF[state] * count
        self.holders[first:end] = [holder] * count
        self.since[first:end] = [seq] * count

    def release(self, run: PageRun, state: int, holder: int, seq: int) -> None:
        """Bring pages into a state that ends their epoch."""
        first, count, epoch = run
        self.move(run, state, holder, seq)
        self.epochs[first : first + count] = [epoch + 1] * count

    def place(self, runs: list[PageRun], place: int, page_tokens: int, root: int) -> None:
        """Say where pages stand in their sequence, in order, and under which identity."""
        places = self.places
        for first, count, _ in runs:
            if count == 1:
                places[first] = place
            else:
                stop = place + count * page_tokens
                places[first : first + count] = range(place, stop, page_tokens)
            if self.is_mixed:
                self.roots[first : first + count] = [root] * count
            place += count * page_tokens

    def inherit(
        self, runs: list[PageRun], source: "Pages", sources: list[PageRun]
    ) -> tuple[int, int]:
        """Pages get the places and identities of others, which are copied to them in this order.

        All of them exist. Returns how many pages ``sources`` are, and how many ``runs``.
        """
        mine, theirs = self.places, source.places
        places: list[int] = []
        for first, count, _ in sources:
            if count == 1:
                places.append(theirs[first])
            else:
                places += theirs[first : first + count]
        at, known = 0, len(places)
        for first, count, _ in runs:
            if count == 1 and at < known:
                mine[first] = places[at]
            elif at + count <= known:
                mine[first : first + count] = places[at : at + count]
            at += count
        if self.is_mixed:
            self._inherit_roots(runs, source, sources)
        return known, at

    def _inherit_roots(self, runs: list[PageRun], source: "Pages", sources: list[PageRun]) -> None:
        at, roots = (
            0,
            [r for first, count, _ in sources for r in source.roots[first : first + count]],
        )
        for first, count, _ in runs:
            if at + count <= len(roots):
                self.roots[first : first + count] = roots[at : at + count]
            at += count

    def is_held_by(self, run: PageRun, lease: int) -> bool:
        """Whether a lease holds all pages of a run, which are of its epoch."""
        first, count, epoch = run
        holders = self.holders
        if count == 1:
            return (
                0 <= first < self.total
                and self.state[first] == HELD
                and self.epochs[first] == epoch
                and holders[first] == lease
            )
        return (
            self.are(first, count, epoch, HELD)
            and holders[first : first + count].count(lease) == count
        )

    def are_placed(self, first: int, count: int, place: int, page_tokens: int) -> bool:
        """Whether the pages of a run stand one behind the other from ``place`` on."""
        if count == 1:
            return self.places[first] == place
        wanted = [*range(place, place + count * page_tokens, page_tokens)]
        return self.places[first : first + count] == wanted

    def num_leased(self) -> int:
        """Count held or sealed pages that an open lease names."""
        pinned = int.from_bytes(self.pins.counts.translate(_IS_PINNED), "little")
        may_be = int.from_bytes(self.state.translate(_MAY_BE_LEASED), "little")
        return (pinned & may_be).bit_count()

    def forget(self) -> None:
        """Know nothing of any page any more: lines are missing."""
        self.state[:] = bytes((UNKNOWN,)) * self.total
        self.places[:] = [-1] * self.total
        self.pins = Pins(self.total)
        self.unlanded.clear()
