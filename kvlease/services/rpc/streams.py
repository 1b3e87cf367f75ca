"""Answers on their way to one client: held back by credit, sent together.

A stream without credit keeps its tokens and costs its neighbours nothing; what it may keep is
bounded, because its request asked for so many tokens. This module knows neither sockets nor the
engine; it is told of tokens and asked for frames.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import final

import trio

from kvlease.protocols.rpc import Ended, Failed, Piece, Tokens
from kvlease.runtime.request import TokenEvent
from kvlease.services.rpc.framing import append_frame

FRAME_TOKENS = 4096
"""One `Tokens` frame holds no more than this, so that control messages get between them."""


@final
class OutStream:
    """One call's tokens that have been published and not been sent.

    Attributes:
        call: the client's number of it.
        scope: cancelling it ends the call.
        delivered: set when its last message has been handed to the writer.
    """

    __slots__ = (
        "_credit", "_end", "_logprobs", "_mark", "_sent", "_tokens", "_tops", "call", "delivered",
        "scope",
    )  # fmt: skip

    def __init__(
        self, call: int, credit: int, *, logprobs: bool, mark: Callable[[OutStream], None]
    ) -> None:
        """Start without tokens; ``mark`` is told when there is something to send."""
        self.call = call
        self.scope = trio.CancelScope()
        self.delivered = trio.Event()
        self._credit = credit
        self._mark = mark
        self._tokens = array("i")
        self._logprobs: list[float | None] | None = [] if logprobs else None
        self._tops: list[list[tuple[int, float]]] = []
        self._sent = 0
        self._end: Ended | Failed | None = None

    def listen(self, events: tuple[TokenEvent, ...]) -> None:
        """Take tokens as they are published."""
        if len(events) == 1:
            self._tokens.append(events[0].token)
        else:
            self._tokens.extend([event.token for event in events])
        if self._logprobs is not None:
            self._logprobs.extend([event.logprob for event in events])
            self._tops.extend([list(event.top_logprobs) for event in events])
        if self._credit > 0:
            self._mark(self)

    def give(self, amount: int) -> None:
        """Let so many more tokens be sent."""
        self._credit += amount
        if self._tokens or self._end is not None:
            self._mark(self)

    def end(self, message: Ended | Failed, *, drops_tokens: bool = False) -> None:
        """Send this behind the last token, or in the place of those that were not sent yet.

        Nothing happens once the last message is on its way: it has to be the last.
        """
        if self.delivered.is_set():
            return
        self._end = message
        if drops_tokens:
            self._tokens = array("i")
        self._mark(self)

    @property
    def has_more(self) -> bool:
        """Whether there are tokens that may be sent now."""
        return bool(self._tokens) and self._credit > 0

    def take(self, num_tokens: int) -> Piece | None:
        """Take up to so many tokens that have credit."""
        count = min(num_tokens, self._credit, len(self._tokens))
        if count <= 0:
            return None
        start = self._sent
        self._sent += count
        self._credit -= count
        if count == len(self._tokens):
            tokens, self._tokens = self._tokens, array("i")
        else:
            tokens = self._tokens[:count]
            del self._tokens[:count]
        if self._logprobs is None:
            return Piece(self.call, start, tokens.tobytes())
        logprobs, tops = self._logprobs[:count], self._tops[:count]
        del self._logprobs[:count], self._tops[:count]
        return Piece(self.call, start, tokens.tobytes(), logprobs, tops)

    def take_end(self) -> Ended | Failed | None:
        """Return the last message once every token before it was taken."""
        if self._end is None or self._tokens:
            return None
        end, self._end = self._end, None
        self.delivered.set()
        return end


@final
class OutStreams:
    """The streams of one connection that have something to send, each in its turn."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Start with none; ``wake`` is called when there is something to send."""
        self._wake = wake
        self._ready: OrderedDict[OutStream, None] = OrderedDict()

    def open(self, call: int, credit: int, *, logprobs: bool) -> OutStream:
        """Make a stream."""
        return OutStream(call, credit, logprobs=logprobs, mark=self._mark)

    def _mark(self, stream: OutStream) -> None:
        self._ready[stream] = None
        self._wake()

    def refill(self, buffer: bytearray) -> None:
        """Append frames with what is ready: one of tokens of all streams, then their ends."""
        ready, left = self._ready, FRAME_TOKENS
        if not ready:
            return
        pieces: list[Piece] = []
        ends: list[Ended | Failed] = []
        for _ in range(len(ready)):
            if left <= 0:
                break
            stream, _ = ready.popitem(last=False)
            piece = stream.take(left)
            if piece is not None:
                pieces.append(piece)
                left -= len(piece.tokens) // 4
            if stream.has_more:
                ready[stream] = None
            elif (end := stream.take_end()) is not None:
                ends.append(end)
        if pieces:
            append_frame(Tokens(pieces), buffer)
        for end in ends:
            append_frame(end, buffer)
