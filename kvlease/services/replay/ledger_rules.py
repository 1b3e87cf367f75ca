"""Rules about a pool's own count: it is the one that follows from the log (R11)."""

from typing import final

from kvlease.protocols.events import PageLedger
from kvlease.services.replay.pages import FREE, HELD, QUARANTINED, SEALED
from kvlease.services.replay.state import World


@final
class LedgerRules:
    """Follows ``page.ledger``."""

    def __init__(self, world: World) -> None:
        """Share the world."""
        self._world = world
        self._findings = world.findings

    def ledger(self, event: PageLedger) -> None:
        """Hold a pool's own count against the log's, column by column."""
        world = self._world
        if world.is_lossy:
            return
        pages = world.tiers[event.tier]
        count = pages.state.count
        pairs = (
            ("quarantined", event.quarantined, count(QUARANTINED)),
            ("leased or cached", event.leased + event.cached, count(HELD) + count(SEALED)),
            ("reserved or free", event.reserved + event.free, count(FREE)),
        )
        for words, told, known in pairs:
            if told != known:
                self._differs(event, f"{told} {event.tier} pages as {words}, the log {known}")
        known = pages.num_leased()
        if event.leased < known:
            self._differs(event, f"{event.leased} leased {event.tier} pages, the log {known}")
        if event.reserved and not world.sequences:
            self._differs(
                event, f"{event.reserved} {event.tier} pages as promised, and nobody runs"
            )
        if 0 <= event.pins < len(world.pins):
            self._differs(event, f"{event.pins} pins, the log {len(world.pins)}")
        if event.leased and not event.pins and not (world.sequences or world.ends):
            self._differs(event, f"{event.leased} leased {event.tier} pages, and nobody holds any")

    def _differs(self, event: PageLedger, what: str) -> None:
        self._findings.violate("R11", f"the pool counts {what}", (event.seq,))
