"""Rules about a transfer's two ends: both held by the right leases, pages in step (R7, R8)."""

from typing import final

from kvlease.protocols.events import PageRun, TransferPlan
from kvlease.services.replay.page_rules import name_of
from kvlease.services.replay.pages import UNKNOWN, Pages
from kvlease.services.replay.state import World


@final
class TransferEnds:
    """Looks at the ends that a ``transfer.plan`` names."""

    def __init__(self, world: World) -> None:
        """Share the world."""
        self._world = world
        self._findings = world.findings
        self._tiers = world.tiers
        self._ends = world.ends
        self._reserved = world.reserved

    def check(
        self, event: TransferPlan, number: int, runs: list[PageRun], tier: str, end: str
    ) -> None:
        """Look at one end: an open lease of the right mode that holds the pages named (R7, R8)."""
        lease = self._ends.get(number)
        if runs:
            pages = self._tiers[tier]
            epochs, total = pages.epochs, pages.total
            for first, count, epoch in runs:
                if not (count == 1 and 0 <= first < total and epochs[first] == epoch) and (
                    not pages.has(first, count)
                    or epochs[first : first + count].count(epoch) != count
                ):
                    self._stale(event, pages, first, count, epoch)
        if lease is None:
            if not self._world.is_lossy:
                self.not_held(event, number, f"its {end} lease {number} is not open", 0)
            return
        if lease.transfer != event.transfer:
            what = (
                f"lease {number} was opened for transfer {lease.transfer}, and transfer "
                f"{event.transfer} names it as its {end}"
            )
            seqs = (lease.seq, event.seq)
            self._findings.violate("R14", what, seqs, transfer=event.transfer, lease=number)
        if lease.tier != tier:
            what = f"its {end} lease {number} is on the {lease.tier} tier and not on {tier}"
            self.not_held(event, number, what, lease.seq)
        if (lease.mode == "shared") is not (end == "source"):
            what = f"its {end} lease {number} is {lease.mode}"
            self.not_held(event, number, what, lease.seq)
        if runs and runs not in (lease.pages, self._reserved.get(number)):
            held = {*_pages_of(lease.pages), *_pages_of(self._reserved.get(number, []))}
            pages = self._tiers[tier]
            known = [run for run in runs if pages.has(run[0], run[1])]  # the others are stale
            if not held.issuperset(_pages_of(known)):
                what = f"its {end} lease {number} does not hold all {end} pages"
                self.not_held(event, number, what, lease.seq)

    def not_held(self, event: TransferPlan, lease: int, why: str, since: int) -> None:
        """Say why an end, or the reader, is not held."""
        what = f"transfer {event.transfer} was planned, and {why}"
        self._findings.violate(
            "R7", what, (since, event.seq), transfer=event.transfer, lease=lease,
            request=event.request,
        )  # fmt: skip

    def _stale(self, event: TransferPlan, pages: Pages, first: int, count: int, epoch: int) -> None:
        name = name_of(pages, first, count)
        if pages.has(first, count):
            known = {
                pages.epochs[page]
                for page in range(first, first + count)
                if pages.state[page] != UNKNOWN and pages.epochs[page] != epoch
            }
            if not known:
                return
            what = f"under epoch {epoch}, and its epoch is {min(known)}"
            since = pages.since[first]
        else:
            what, since = "and there is no such page", 0
        self._findings.violate(
            "R8", f"transfer {event.transfer} names {name} {what}", (since, event.seq),
            transfer=event.transfer, request=event.request,
        )  # fmt: skip

    def hand_on(self, event: TransferPlan, *, are_known: bool) -> int:
        """Let pages keep their place and their identity when they move; returns how many move.

        ``are_known`` if all of them are known to exist.
        """
        source, target = self._tiers[event.source_tier], self._tiers[event.destination_tier]
        sources, targets = event.source, event.destination
        if not are_known:  # what is wrong with one that is no run of pages at all has been said
            sources = [run for run in sources if source.has(run[0], run[1])]
            targets = [run for run in targets if target.has(run[0], run[1])]
        total, moved = target.inherit(targets, source, sources)
        if moved != total:
            what = f"transfer {event.transfer} moves {total} pages to {moved}"
            self._findings.violate("R7", what, (event.seq,), transfer=event.transfer)
        return total


def _pages_of(runs: list[PageRun]) -> list[int]:
    return [page for first, count, _ in runs for page in range(first, first + count)]
