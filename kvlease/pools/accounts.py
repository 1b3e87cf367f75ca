"""The accounts of one engine's memory: every book recounted against all who hold from it (R11).

The books keep running counts; nothing here trusts them.
"""

from collections.abc import Sequence

from kvlease.errors import LedgerImbalance
from kvlease.pools.held import Held
from kvlease.pools.memory import Memory
from kvlease.pools.prefix_index import PrefixIndex
from kvlease.pools.prefix_node import TIERS
from kvlease.protocols.event_base import EventSink
from kvlease.protocols.event_pages import PageLedger


def check(
    memory: Memory, index: PrefixIndex, held: Sequence[Held], tail_slots: Sequence[int]
) -> None:
    """Recount every book, page by page; raises LedgerImbalance for the first that differs.

    ``held`` are all running sequences, ``tail_slots`` those taken for steps under way.
    """
    holdings = index.check()
    owned = [page for one in held for page in one.owned]
    memory.device.check(owned, holdings.pages["device"])
    memory.host.check([], holdings.pages["host"])
    memory.device_tail_slots.check(tail_slots, holdings.tails["device"])
    memory.host_tail_slots.check([], holdings.tails["host"])
    memory.slots.check([one.lease.slot for one in held], [])
    reserved = sum(one.reservation.remaining for one in held)
    if memory.device.ledger().reserved != reserved:
        raise LedgerImbalance(f"device pages: {reserved} promised to sequences, book differs")


def say(memory: Memory, index: PrefixIndex, sink: EventSink, num_pins: int) -> None:
    """Write both tiers' own counts into the log; ``num_pins`` are those that callers hold."""
    if not sink.audit:
        return
    counts = index.statistics()
    pinned = {"device": counts.device_pages_pinned, "host": counts.host_pages_pinned}
    for tier in TIERS:
        ledger = memory.book(tier).ledger()
        sink.emit(
            PageLedger(
                tier=tier,
                quarantined=ledger.quarantined,
                leased=ledger.held + pinned[tier],
                cached=ledger.sealed - pinned[tier],
                reserved=ledger.reserved,
                free=ledger.free,
                pins=num_pins,
            )
        )
