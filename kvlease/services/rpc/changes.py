"""A subscription to what happens to cached pages: pulled from the tenant's channel, never pushed.

A client that is slow falls behind in the channel, which keeps so many events, and is told what it
has missed; nothing is kept for it.
"""

from __future__ import annotations

from typing import final

from kvlease.protocols.rpc import CacheEvents, Failed
from kvlease.runtime.cache_feed import Channel
from kvlease.services.rpc.framing import append_frame

EVENTS_AT_ONCE = 256


@final
class OutChanges:
    """One subscription on its way to a client."""

    def __init__(self, call: int, channel: Channel, since: int | None, credit: int) -> None:
        """Begin behind an event, or behind the latest (None)."""
        self.call = call
        self._channel = channel
        self._at = channel.last if since is None else max(0, min(since, channel.last))
        self._credit = credit
        self._is_begun = False

    def give(self, amount: int) -> None:
        """Let so many more events be sent."""
        self._credit += amount

    def refill(self, buffer: bytearray) -> None:
        """Append one frame with what is new, as far as there is credit.

        The first one comes at once, and may have no event: it says where the subscription begins.
        """
        channel = self._channel
        if self._is_begun and (self._at >= channel.last or self._credit <= 0):
            return
        self._is_begun = True
        lost = channel.lost if channel.lost > self._at else 0
        events = channel.after(self._at, min(EVENTS_AT_ONCE, self._credit))
        self._at = events[-1].number if events else max(self._at, lost)
        self._credit -= len(events)
        append_frame(CacheEvents(self.call, self._at, events, lost), buffer)


def unsubscribed(call: int) -> Failed:
    """Return the last message of a subscription that its client has cancelled."""
    return Failed(call, "cancelled", "the subscription was cancelled")
