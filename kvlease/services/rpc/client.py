"""The RPC client: `connect` gives a `Client` whose calls share one connection.

A connection that breaks is made anew for the next call. What was under way on it raises
ConnectionLost: a generation is never repeated without being asked for again, because the server may
have carried it out. This module loads no torch.
"""

from __future__ import annotations

import itertools
import math
import ssl
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar, final

import trio
from attrs import frozen

from kvlease.errors import (
    ConnectionLost,
    DeadlineExceeded,
    KVLeaseError,
    PromptError,
    Refused,
    UsageError,
)
from kvlease.protocols import rpc
from kvlease.protocols.config import SamplingParams
from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.services.rpc.address import Address, parse_address
from kvlease.services.rpc.answers import Question, RemoteAnswer
from kvlease.services.rpc.following import RemoteChanges
from kvlease.services.rpc.link import Link, open_link

A = TypeVar("A", bound=rpc.Answer)
WINDOW_TOKENS = 4096
"""Tokens of one answer that may be on their way, or received and not taken."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
"""Between attempts to reach a server, doubling."""


@frozen
class Where:
    """A server, and how to reach it."""

    address: Address
    tenant: str
    secret: bytes
    tls: ssl.SSLContext | None
    connect_timeout_s: float
    call_timeout_s: float


@final
class Client:
    """A server's calls, from any number of tasks of one Trio run."""

    def __init__(self, where: Where, nursery: trio.Nursery) -> None:
        """Made by `connect`."""
        self._where = where
        self._nursery = nursery
        self._link: Link | None = None
        self._connecting = trio.Lock()
        self._numbers = itertools.count(1)
        self._is_closed = False
        self.num_connections = 0
        """Connections made so far; more than one if some broke."""

    @property
    def welcome(self) -> rpc.Welcome:
        """What the server said of itself when it was last reached."""
        assert self._link is not None, "connect reaches the server first"
        return self._link.welcome

    async def link(self) -> Link:
        """Return the live connection, making one if need be.

        Checkpoints: always. Raises ConnectionLost if the server cannot be reached in time, Refused
        if it lets nobody in.
        """
        async with self._connecting:
            link = self._link
            if self._is_closed:
                raise UsageError("the client was used after its block was left")
            if link is None or link.lost is not None:
                link = self._link = await self._reach()
                self.num_connections += 1
                self._nursery.start_soon(link.run)
            return link

    async def _reach(self) -> Link:
        where, pause_s = self._where, FIRST_PAUSE_S
        problem = "no answer"
        with trio.move_on_after(where.connect_timeout_s):
            while True:
                try:
                    return await open_link(where.address, where.tenant, where.secret, where.tls)
                except (OSError, ConnectionLost) as error:
                    problem = str(error) or type(error).__name__
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise ConnectionLost(
            f"no server was reached at {where.address} within {where.connect_timeout_s:g} s"
            f" ({problem})"
        )

    def close(self) -> None:
        """Make no more connections."""
        self._is_closed = True

    # -- answers -------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(
        self,
        prompt: Sequence[int] | bytes,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        window: int = WINDOW_TOKENS,
    ) -> AsyncGenerator[RemoteAnswer]:
        """Answer a prompt, streaming; leaving the block ends the answer at the server.

        Args:
            prompt: token ids, or the same as int32 little-endian bytes.
            params: how the answer is drawn.
            timeout_s: ends it as late after so many seconds, reaching the server included; the
                server has a bound of its own.
            window: tokens that the server may send ahead of this reader.

        Checkpoints: on entry. Raises ConnectionLost, DeadlineExceeded and Refused as the answer's
        iteration does.
        """
        if window < 1:
            raise UsageError(f"window is {window}; give 1 or more, or no token may be sent")
        number = next(self._numbers)
        tokens = _pack(prompt)
        link, left_s = await self._link_within(timeout_s)

        def give(amount: int) -> None:
            link.writer.put(rpc.Credit(number, amount))

        answer = RemoteAnswer(number, window, left_s, give)
        chosen = params or SamplingParams()
        link.begin(number, answer, rpc.Generate(number, tokens, chosen, window, left_s))
        try:
            yield answer
        finally:
            if not answer.is_over:
                link.forget(number)
                link.writer.put(rpc.Cancel(number))

    async def _link_within(self, timeout_s: float | None) -> tuple[Link, float | None]:
        """Return a connection with room for a call, and what is left of the call's time."""
        if timeout_s is None:
            link = await self.link()
            await link.writer.room()
            return link, None
        if not timeout_s > 0:
            raise UsageError(f"timeout_s is {timeout_s}; give seconds above 0")
        end_s = trio.current_time() + timeout_s
        with trio.CancelScope(deadline=end_s):
            link = await self.link()
            await link.writer.room()
            left_ms = math.ceil(1000 * (end_s - trio.current_time()))
            if left_ms > 0:
                return link, left_ms / 1000
        raise DeadlineExceeded(
            f"the server at {self._where.address} was not reached within {timeout_s:g} s"
        )

    # -- questions -----------------------------------------------------------------------------

    async def health(self) -> rpc.Health:
        """Ask whether the server takes requests. Checkpoints: always."""
        answer = await self._ask(rpc.HealthIs, rpc.GetHealth, again=True)
        return answer.health

    async def statistics(self, *, recount: bool = False) -> rpc.ServerStatistics:
        """Ask for counters and pools; ``recount`` counts every page anew. Checkpoints: always."""
        answer = await self._ask(
            rpc.StatisticsAre, lambda call: rpc.GetStatistics(call, recount), again=True
        )
        return answer.statistics

    async def flush(self) -> None:
        """Forget everything cached, because the weights changed. Checkpoints: always."""
        await self._ask(rpc.Flushed, rpc.Flush)

    async def prefetch(
        self, prompt: Sequence[int] | bytes, tier: rpc.CacheTier = "device"
    ) -> rpc.Prefetched:
        """Bring what is cached of a prompt to a tier, and wait until it is there.

        Checkpoints: always.
        """
        tokens = _pack(prompt)
        return await self._ask(rpc.Prefetched, lambda call: rpc.Prefetch(call, tokens, tier))

    async def pin(self, prompt: Sequence[int] | bytes, seconds: float) -> rpc.Pinned:
        """Keep what is cached of a prompt from being evicted for so long. Checkpoints: always."""
        tokens = _pack(prompt)
        return await self._ask(rpc.Pinned, lambda call: rpc.Pin(call, tokens, seconds))

    async def unpin(self, pin: int) -> bool:
        """End a pin; says whether there was such a pin. Checkpoints: always."""
        return (await self._ask(rpc.Unpinned, lambda call: rpc.Unpin(call, pin))).was_pinned

    async def evict(
        self, prefix: Sequence[int] | bytes, tier: rpc.CacheTier | None = None
    ) -> rpc.Evicted:
        """Let every idle page go whose prefix begins with these tokens. Checkpoints: always."""
        tokens = _pack(prefix)
        return await self._ask(rpc.Evicted, lambda call: rpc.Evict(call, tokens, tier))

    @asynccontextmanager
    async def changes(self, since: int | None = None) -> AsyncGenerator[RemoteChanges]:
        """Follow what happens to this tenant's cached pages, from now on or from an event on.

        Goes on over connections that break: the server is asked again from the last event on, and
        what it does not have any more shows as `RemoteChanges.lost`. Checkpoints: on entry.
        """
        changes = RemoteChanges(since)
        async with open_flat_nursery() as nursery:
            nursery.start_soon(self._follow, changes)
            try:
                yield changes
            finally:
                nursery.cancel_scope.cancel()

    async def _link_again(self) -> Link:
        """As `link`, with patience for a server that is being replaced."""
        end_s = trio.current_time() + self._where.connect_timeout_s
        while True:
            try:
                return await self.link()
            except Refused as error:
                if error.code not in ("draining", "too_many") or trio.current_time() >= end_s:
                    raise
            await trio.sleep(FIRST_PAUSE_S)

    async def _follow(self, changes: RemoteChanges) -> None:
        """Subscribe, and again whenever the connection breaks; ends when the server refuses."""
        while True:
            number = next(self._numbers)
            try:
                link = await self._link_again()
                first = changes.begin(number, link.welcome.incarnation, link.writer.put)
                link.begin(number, changes, first)
            except KVLeaseError as error:
                changes.fail(error)
                return
            try:
                await changes.interrupted.wait()
            finally:
                link.forget(number)
                link.writer.put(rpc.Cancel(number))
            if changes.is_over:
                return

    async def drain(self, timeout_s: float | None = None) -> int:
        """End the server once its answers are complete; returns how many had to be cut short.

        Checkpoints: always.
        """
        answer = await self._ask(rpc.Drained, rpc.Drain, timeout_s=timeout_s)
        return answer.cut

    async def _ask(
        self,
        expected: type[A],
        make: Callable[[int], rpc.ClientMessage],
        *,
        again: bool = False,
        timeout_s: float | None = None,
    ) -> A:
        """Ask one question and return its answer; ``again`` if asking twice does no harm."""
        seconds = self._where.call_timeout_s if timeout_s is None else timeout_s
        with trio.move_on_after(seconds):
            try:
                return await self._ask_once(expected, make)
            except ConnectionLost:
                if not again:
                    raise
            return await self._ask_once(expected, make)
        raise DeadlineExceeded(
            f"the server at {self._where.address} gave no answer in {seconds:g} s"
        )

    async def _ask_once(self, expected: type[A], make: Callable[[int], rpc.ClientMessage]) -> A:
        number, question = next(self._numbers), Question()
        link = await self.link()
        link.begin(number, question, make(number))
        try:
            answer = await question.wait()
        finally:
            link.forget(number)
        if not isinstance(answer, expected):
            raise ConnectionLost(f"the server answered with {type(answer).__name__}")
        return answer


def _pack(prompt: Sequence[int] | bytes) -> bytes:
    if isinstance(prompt, bytes):
        return prompt
    try:
        return array("i", prompt).tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise PromptError(f"a prompt must hold token ids that fit int32: {error}") from error


@asynccontextmanager
async def connect(
    address: str,
    *,
    tenant: str = "",
    secret: bytes | str = b"",
    tls: ssl.SSLContext | None = None,
    connect_timeout_s: float = 10.0,
    call_timeout_s: float = 60.0,
) -> AsyncGenerator[Client]:
    """Connect to a kvlease server for a block.

    Args:
        address: ``tcp://HOST:PORT`` or ``unix://PATH``.
        tenant: the tenant's name, where the server has tenants.
        secret: what the server and this client both know; it never travels.
        tls: encrypts a TCP connection, and verifies the server's certificate.
        connect_timeout_s: for reaching the server, the first time and after a loss.
        call_timeout_s: for calls with one answer.

    Checkpoints: on entry and exit. Raises ConnectionLost if nobody answers in time, Refused if the
    server lets nobody in or is not to be trusted, ConfigError for an address that is none.
    """
    key = secret.encode() if isinstance(secret, str) else secret
    where = Where(parse_address(address), tenant, key, tls, connect_timeout_s, call_timeout_s)
    async with open_flat_nursery() as nursery:
        client = Client(where, nursery)
        await client.link()
        try:
            yield client
        finally:
            client.close()
            nursery.cancel_scope.cancel()
