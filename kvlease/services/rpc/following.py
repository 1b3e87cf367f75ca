"""What happens to cached pages, as a client follows it over connections that come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import final

import trio

from kvlease.errors import KVLeaseError
from kvlease.protocols.rpc import (
    CacheEvent,
    CacheEvents,
    ClientMessage,
    Credit,
    Ended,
    Failed,
    Subscribe,
)
from kvlease.services.rpc.answers import Waiting, error_of

WINDOW_EVENTS = 1024
"""Events that may be on their way, or received and not taken."""


@final
class RemoteChanges(Waiting):
    """Events in order, each once; iterate once.

    Attributes:
        last: number of the last event that came; ask from here to go on later.
        lost: events that the server did not have any more when it was asked for them: whoever
            keeps a picture of the cache has to make it anew.
        restarts: how often another run of the server was met, which began with an empty cache and
            numbers its events from 1.
        interrupted: set while there is no subscription.
    """

    def __init__(self, since: int | None) -> None:
        """Made by the client."""
        self.last = since
        self.lost = 0
        self.restarts = 0
        self.interrupted = trio.Event()
        self._incarnation = ""
        self._events: deque[CacheEvent] = deque()
        self._wake = trio.Event()
        self._error: KVLeaseError | None = None
        self._call = 0
        self._taken = 0
        self._send: Callable[[ClientMessage], None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the server has refused to go on."""
        return self._error is not None

    def begin(
        self, call: int, incarnation: str, send: Callable[[ClientMessage], None]
    ) -> Subscribe:
        """Return what asks a server for the events that have not come yet."""
        if self._incarnation not in ("", incarnation):
            self.last, self.restarts = 0, self.restarts + 1
        self._incarnation = incarnation
        self.interrupted = trio.Event()
        self._call, self._send, self._taken = call, send, 0
        return Subscribe(call, self.last, max(1, WINDOW_EVENTS - len(self._events)))

    def changed(self, message: CacheEvents) -> None:
        """Take events that came."""
        if message.lost:
            self.lost += message.lost - (self.last or 0)
        self.last = message.last
        self._events.extend(message.events)
        self._wake.set()

    def close(self, end: Ended | Failed | KVLeaseError) -> None:
        """Take the end of one subscription; the end of a connection is not the end of all."""
        if isinstance(end, Failed):
            self.fail(error_of(end))
        self.interrupted.set()

    def fail(self, error: KVLeaseError) -> None:
        """Let iteration raise this once every event has been taken."""
        self._error = error
        self._wake.set()

    def __aiter__(self) -> RemoteChanges:
        """Iterate over the events; without an end while the server is there."""
        return self

    async def __anext__(self) -> CacheEvent:
        """Return the next event. Checkpoints: only if it waits. Raises Refused, ConnectionLost."""
        while not self._events:
            if self._error is not None:
                raise self._error from None
            self._wake = trio.Event()
            await self._wake.wait()
        self._taken += 1
        if 2 * self._taken >= WINDOW_EVENTS and self._send is not None:
            self._send(Credit(self._call, self._taken))
            self._taken = 0
        return self._events.popleft()
