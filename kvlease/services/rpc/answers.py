"""Answers as a client receives them: tokens buffered up to the credit it gave, and one end.

This module knows no socket: a link feeds it, and it tells the link what credit to give.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import final

import msgspec
import trio

from kvlease.errors import (
    ConnectionLost,
    DeadlineExceeded,
    KVLeaseError,
    Refused,
    RequestFailed,
)
from kvlease.protocols.events import Usage
from kvlease.protocols.rpc import Answer, CacheEvents, Ended, Failed, Piece

LATE_S = 5.0
"""How much later than asked for the server's word may come that a deadline has passed."""


class RemoteToken(msgspec.Struct, frozen=True, gc=False):
    """One token of an answer; log-probabilities are there if asked for."""

    index: int
    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class RemoteResult(msgspec.Struct, frozen=True):
    """How an answer ended; as `GenerateResult`, but for the digests."""

    tokens: tuple[int, ...]
    finish_reason: str
    usage: Usage
    ttft_s: float | None
    tpot_s: float | None


class Waiting:
    """Who a server's messages about one call are for; those that it does not want are dropped."""

    def feed(self, piece: Piece) -> None:
        """Take tokens that came."""

    def answer(self, message: Answer) -> None:
        """Take the call's one answer."""

    def changed(self, message: CacheEvents) -> None:
        """Take what happened to cached pages."""

    def close(self, end: Ended | Failed | KVLeaseError) -> None:
        """Take the last message of a call, or what stands in its place."""


@final
class Question(Waiting):
    """A call with one answer."""

    def __init__(self) -> None:
        """Not answered yet."""
        self._event = trio.Event()
        self._outcome: Answer | KVLeaseError | None = None

    def answer(self, message: Answer) -> None:
        """Take the answer."""
        self._outcome = message
        self._event.set()

    def close(self, end: Ended | Failed | KVLeaseError) -> None:
        """Take the refusal, or the loss of the connection."""
        if self._outcome is None and not isinstance(end, Ended):
            self._outcome = error_of(end)
            self._event.set()

    async def wait(self) -> Answer:
        """Wait for the answer; raises Refused and ConnectionLost. Checkpoints: always."""
        await self._event.wait()
        outcome = self._outcome
        if isinstance(outcome, KVLeaseError):
            raise outcome
        assert outcome is not None
        return outcome


def error_of(end: Failed | KVLeaseError) -> KVLeaseError:
    """Return the error that a failed call raises at its client."""
    return Refused(end.code, end.message, end.retry_after_s) if isinstance(end, Failed) else end


@final
class RemoteAnswer(Waiting):
    """The tokens of one answer as they come over the connection; iterate once.

    A reader that stops taking tokens stops this answer only: the server sends no more than the
    credit of ``window`` tokens.
    """

    def __init__(
        self, call: int, window: int, timeout_s: float | None, give: Callable[[int], None]
    ) -> None:
        """Made by the client; ``give`` grants the server credit for so many more tokens."""
        self.call = call
        self.tokens: list[int] = []
        """Every token taken so far."""
        self._window = window
        self._timeout_s = timeout_s
        self._end_s = None if timeout_s is None else trio.current_time() + timeout_s + LATE_S
        self._give = give
        self._taken = 0
        self._pieces: deque[Piece] = deque()
        self._ready: Iterator[RemoteToken] = iter(())
        self._wake = trio.Event()
        self._end: Ended | KVLeaseError | None = None

    # -- fed by the link -----------------------------------------------------------------------

    def feed(self, piece: Piece) -> None:
        """Take tokens that came; from a server that sends none that are any, nothing more."""
        if not _is_sound(piece):
            self.close(ConnectionLost("the server sent tokens that are none"))
        elif self._end is None:
            self._pieces.append(piece)
            self._wake.set()

    def close(self, end: Ended | Failed | KVLeaseError) -> None:
        """Take the last message, or what stands in its place; the first one counts."""
        if self._end is None:
            self._end = end if isinstance(end, Ended) else error_of(end)
            self._wake.set()

    @property
    def is_over(self) -> bool:
        """Whether the last message has come."""
        return self._end is not None

    # -- for the user --------------------------------------------------------------------------

    def __aiter__(self) -> RemoteAnswer:
        """Iterate over the tokens, once; leaving the loop early is fine."""
        return self

    async def __anext__(self) -> RemoteToken:
        """Return the next token; raises what ended the answer early, after its last token.

        Checkpoints: only if it waits. Raises Refused, ConnectionLost and DeadlineExceeded.
        """
        for token in self._ready:
            return token
        piece = await self._next()
        if piece is None:
            raise StopAsyncIteration
        self._ready = _tokens_of(piece)
        return next(self._ready)

    async def batches(self) -> AsyncIterator[list[int]]:
        """Yield tokens in the groups that they came in, which is cheaper; otherwise as iteration.

        Checkpoints: only if it waits.
        """
        while (piece := await self._next()) is not None:
            yield array("i", piece.tokens).tolist()

    async def _next(self) -> Piece | None:
        while not self._pieces:
            if isinstance(self._end, KVLeaseError):
                raise self._end from None
            if self._end is not None:
                return None
            await self._wait()
        piece = self._pieces.popleft()
        tokens = array("i", piece.tokens)
        self.tokens.extend(tokens)
        self._taken += len(tokens)
        if 2 * self._taken >= self._window and self._end is None:
            self._give(self._taken)
            self._taken = 0
        return piece

    async def _wait(self) -> None:
        self._wake = trio.Event()
        if self._end_s is None:
            await self._wake.wait()
            return
        with trio.CancelScope(deadline=self._end_s) as scope:
            await self._wake.wait()
        if scope.cancelled_caught:
            raise DeadlineExceeded(
                f"the server gave no end to call {self.call} within {self._timeout_s:g} s"
            )

    async def drain(self) -> RemoteResult:
        """Read all tokens and return the result; raises as iteration does."""
        while await self._next() is not None:
            pass
        return self.result

    @property
    def result(self) -> RemoteResult:
        """How the answer ended; raises RequestFailed while it has not."""
        end = self._end
        if not isinstance(end, Ended):
            raise RequestFailed(f"call {self.call} has no result (yet); read its tokens first")
        return RemoteResult(
            tuple(self.tokens), end.finish_reason, end.usage, end.ttft_s, end.tpot_s
        )


def _is_sound(piece: Piece) -> bool:
    """Return whether a piece holds tokens, and as many of all that is told of them."""
    count, rest = divmod(len(piece.tokens), 4)
    told = [items for items in (piece.logprobs, piece.top_logprobs) if items is not None]
    return count > 0 and not rest and all(len(items) == count for items in told)


def _tokens_of(piece: Piece) -> Iterator[RemoteToken]:
    tokens = array("i", piece.tokens)
    if piece.logprobs is None:
        return map(RemoteToken, range(piece.start, piece.start + len(tokens)), tokens)
    tops = piece.top_logprobs or [[] for _ in tokens]
    return iter(
        [
            RemoteToken(piece.start + place, token, piece.logprobs[place], tuple(tops[place]))
            for place, token in enumerate(tokens)
        ]
    )
