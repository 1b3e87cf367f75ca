"""What happens to cached pages, kept for a while for those who follow it from elsewhere.

Each tenant has a channel of its own, with numbers of its own: nobody can tell from gaps in them
what another tenant does. A channel keeps its latest events; who comes too late for one is told so.
"""

from collections import deque
from collections.abc import Callable
from typing import final

from kvlease.protocols.rpc import CacheEvent, CacheTier, Change

MAX_ROOTS = 1 << 16
"""Identities that are remembered; each flush gives every tenant another one."""


@final
class Channel:
    """One tenant's events, numbered from 1 without gaps.

    Attributes:
        last: number of the latest event.
        listeners: called, on the Trio thread, after each event.
    """

    def __init__(self, capacity: int) -> None:
        """Keep the latest ``capacity`` events."""
        self.last = 0
        self.listeners: dict[Callable[[], None], None] = {}
        self._events: deque[CacheEvent] = deque(maxlen=capacity)

    def note(self, change: Change, tier: CacheTier, keys: bytes) -> None:
        """Keep an event and tell of it."""
        self.last += 1
        self._events.append(CacheEvent(self.last, change, tier, keys))
        for listener in tuple(self.listeners):
            listener()

    @property
    def lost(self) -> int:
        """Number of the latest event that is not kept any more; 0 if all are."""
        return self.last - len(self._events)

    def after(self, number: int, limit: int) -> list[CacheEvent]:
        """Return up to ``limit`` kept events that follow ``number``, in order."""
        first = max(0, number - self.lost)
        return [self._events[i] for i in range(first, min(first + limit, len(self._events)))]


@final
class CacheFeed:
    """The channels of all tenants, by salt; an index's observer."""

    def __init__(self, capacity: int) -> None:
        """Keep so many events of each tenant."""
        self._capacity = capacity
        self._channels: dict[bytes, Channel] = {}
        self._by_root: dict[bytes, Channel] = {}

    def channel(self, salt: bytes) -> Channel:
        """Return a tenant's channel."""
        channel = self._channels.get(salt)
        if channel is None:
            channel = self._channels[salt] = Channel(self._capacity)
        return channel

    def follow(self, root: bytes, salt: bytes) -> None:
        """Let what happens under a root be told in a tenant's channel from now on."""
        if root not in self._by_root:
            if len(self._by_root) >= MAX_ROOTS:
                del self._by_root[next(iter(self._by_root))]
            self._by_root[root] = self.channel(salt)

    def __call__(self, change: Change, tier: CacheTier, identity: bytes, keys: bytes) -> None:
        """Take note of pages that came or left."""
        channel = self._by_root.get(identity)
        if channel is not None and keys:
            channel.note(change, tier, keys)
