"""One client's connection at the server: reads its calls, answers them, ends with it.

Reading and writing are two tasks; each answer under way is one more, which sleeps while tokens flow
past it. Leaving ends all of them, and with them the engine's requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, final

import msgspec
import trio

from kvlease.errors import BadInput, Refused
from kvlease.protocols import rpc
from kvlease.protocols.events import Usage
from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.services.rpc.changes import OutChanges, unsubscribed
from kvlease.services.rpc.framing import ByteStream, FrameError, FrameReader, FrameWriter, linger
from kvlease.services.rpc.queries import Query, answer_query
from kvlease.services.rpc.streams import OutStream, OutStreams
from kvlease.services.serving.service import Call, Client, Service

if TYPE_CHECKING:
    from kvlease.runtime.cache_feed import Channel
    from kvlease.runtime.engine import AnswerStream

MAX_QUERIES = 64
"""Calls of one connection that are no answers, at a time."""
GOODBYE_S = 1.0
"""For a client that is sent away to take the sentence that says why."""
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Head(msgspec.Struct, array_like=True):
    """As much of a call as can be read although the rest cannot."""

    number: int
    call: int


_decode = msgspec.msgpack.Decoder(rpc.ClientMessage).decode
_decode_head = msgspec.msgpack.Decoder(_Head).decode
_FIRST_CALL, _LAST_CALL = 16, 31
"""Numbers of messages that begin a call, or are about one."""


@final
class Connection:
    """Serves one client that has passed the handshake, until it goes or is sent away."""

    def __init__(self, stream: ByteStream, service: Service, client: Client) -> None:
        """Borrows all three."""
        limits = service.limits
        self._stream = stream
        self._service = service
        self._client = client
        self._reader = FrameReader(
            stream,
            max_bytes=limits.max_frame_bytes,
            frame_timeout_s=limits.frame_timeout_s,
            idle_timeout_s=limits.idle_timeout_s,
        )
        self._writer = FrameWriter(stream, timeout_s=limits.write_timeout_s, refill=self._refill)
        self._out = OutStreams(self._writer.wake)
        self._calls: dict[int, OutStream] = {}
        self._changes: dict[int, OutChanges] = {}
        self._queries: set[int] = set()
        self._channel: Channel | None = None
        """The tenant's, once the client has subscribed to it."""
        self._read_scope = trio.CancelScope()
        self._written = trio.Event()

    def _refill(self, buffer: bytearray) -> None:
        self._out.refill(buffer)
        for changes in self._changes.values():
            changes.refill(buffer)

    async def run(self) -> str:
        """Serve until the client has gone or was sent away; returns the reason, for the log.

        Checkpoints: always. When the server has drained, the client is told and the call returns.
        """
        reason = "closed"
        try:
            async with open_flat_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._end_when_drained)
                try:
                    await self._read(nursery)
                except FrameError as error:
                    reason = error.code
                    self._writer.finish(rpc.Goodbye(error.code, str(error)))
                    with trio.move_on_after(GOODBYE_S):
                        await self._written.wait()
                        await linger(self._stream)
                nursery.cancel_scope.cancel()
        except FrameError as error:
            reason = error.code
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            reason = "lost"
        finally:
            self._client.received_bytes = self._reader.nbytes
            self._client.sent_bytes = self._writer.nbytes
            if self._channel is not None:
                self._channel.listeners.pop(self._writer.wake, None)
        return "draining" if self._service.drained.is_set() else reason

    async def _write(self) -> None:
        """Send until there is a last message, then let the reader go as well."""
        await self._writer.run()
        self._written.set()
        self._read_scope.cancel()

    async def _end_when_drained(self) -> None:
        await self._service.drained.wait()
        self._finish_if_drained()

    def _finish_if_drained(self) -> None:
        """Say goodbye once nothing is under way any more."""
        if self._service.drained.is_set() and not self._queries:
            self._writer.finish(rpc.Goodbye("draining", "the server has ended"))

    async def _read(self, nursery: trio.Nursery) -> None:
        with self._read_scope:
            while frames := await self._reader.receive():
                for body in frames:
                    try:
                        message = _decode(body)
                    except (*_UNREADABLE, BadInput) as error:
                        self._cannot_read(body, error)
                    else:
                        self._take(message, nursery)
                await self._writer.room()

    def _cannot_read(self, body: bytes, error: Exception) -> None:
        """Refuse one call if it can be told which; else the connection has to end."""
        text = " ".join(str(error).split())
        try:
            head = _decode_head(body)
        except _UNREADABLE:
            head = None
        if head is None or not _FIRST_CALL <= head.number <= _LAST_CALL:
            raise FrameError("protocol", f"a frame is no message (docs/rpc.md): {text}")
        if self._is_under_way(head.call):
            raise FrameError("protocol", f"a message about call {head.call} is none: {text}")
        refusal = self._service.refuse_client(
            self._client, "bad_request", f"call {head.call} cannot be read: {text}"
        )
        self._writer.put(rpc.Failed(head.call, "bad_request", str(refusal)))

    # -- messages ------------------------------------------------------------------------------

    def _take(self, message: rpc.ClientMessage, nursery: trio.Nursery) -> None:
        match message:
            case rpc.Generate():
                self._check_new(message.call)
                wants = message.params.logprobs is not None
                stream = self._out.open(message.call, max(0, message.credit), logprobs=wants)
                self._calls[message.call] = stream
                nursery.start_soon(self._generate, message, stream)
            case rpc.Credit():
                self._give(message)
            case rpc.Cancel():
                self._cancel(message)
            case rpc.Subscribe():
                self._check_new(message.call)
                self._subscribe(message)
            case rpc.Ping():
                self._writer.put(rpc.Pong(message.number))
            case _:
                self._take_query(message, nursery)

    def _give(self, message: rpc.Credit) -> None:
        taker = self._calls.get(message.call) or self._changes.get(message.call)
        if taker is not None and message.amount > 0:
            taker.give(message.amount)
            self._writer.wake()

    def _cancel(self, message: rpc.Cancel) -> None:
        stream = self._calls.get(message.call)
        if stream is not None:
            stream.scope.cancel()
        elif self._changes.pop(message.call, None) is not None:
            self._writer.put(unsubscribed(message.call))

    def _is_under_way(self, call: int) -> bool:
        return call in self._calls or call in self._changes or call in self._queries

    def _check_new(self, call: int) -> None:
        if self._is_under_way(call):
            raise FrameError("protocol", f"call {call} is under way already; count calls up")

    # -- generating ----------------------------------------------------------------------------

    async def _generate(self, message: rpc.Generate, out: OutStream) -> None:
        """Carry one answer from the engine to the writer; always ends with one last message."""
        usage = Usage(prompt=len(message.prompt) // 4)
        try:
            with out.scope:
                async with self._service.generate(
                    self._client,
                    message.prompt,
                    message.params,
                    timeout_s=message.timeout_s,
                    listener=out.listen,
                ) as (stream, call):
                    try:
                        await self._answer(message.call, stream, call, out)
                    finally:
                        usage = stream.request.usage()
        except Refused as error:
            failed = rpc.Failed(message.call, code_of(error), str(error), error.retry_after_s)
            out.end(failed, drops_tokens=True)
        if out.scope.cancelled_caught:
            out.end(rpc.Ended(message.call, "cancelled", usage), drops_tokens=True)
        del self._calls[message.call]

    async def _answer(self, number: int, stream: AnswerStream, call: Call, out: OutStream) -> None:
        """Wait for the engine, then for the client to have taken what it was sent."""
        error = await stream.ended()
        if error is None:
            result = stream.result
            out.end(
                rpc.Ended(number, result.finish_reason, result.usage, result.ttft_s, result.tpot_s)
            )
        else:
            refusal = self._service.note(self._client, call, error)
            out.end(rpc.Failed(number, code_of(refusal), str(refusal), refusal.retry_after_s))
        patience_s = self._service.limits.slow_reader_timeout_s
        with trio.move_on_after(patience_s) as scope:
            await out.delivered.wait()
        if scope.cancelled_caught:
            raise Refused("slow_reader", f"the answer was not taken within {patience_s:g} s")

    # -- following the cache -------------------------------------------------------------------

    def _subscribe(self, message: rpc.Subscribe) -> None:
        service, client = self._service, self._client
        try:
            with service.calling(client, Call("subscribe")):
                if len(self._changes) >= MAX_QUERIES:
                    raise Refused("too_many", f"{MAX_QUERIES} subscriptions are open here")
                channel = service.engine.cache.changes(salt=client.tenant.salt)
        except Refused as error:
            self._writer.put(rpc.Failed(message.call, code_of(error), str(error)))
            return
        changes = OutChanges(message.call, channel, message.since, max(0, message.credit))
        self._changes[message.call] = changes
        if self._channel is None:
            self._channel = channel
            channel.listeners[self._writer.wake] = None
        self._writer.wake()

    # -- everything else -----------------------------------------------------------------------

    def _take_query(self, message: Query, nursery: trio.Nursery) -> None:
        self._check_new(message.call)
        if len(self._queries) >= MAX_QUERIES:
            text = f"{MAX_QUERIES} calls of this connection are under way; wait for an answer"
            self._writer.put(rpc.Failed(message.call, "too_many", text, 1.0))
            return
        self._queries.add(message.call)
        nursery.start_soon(self._query, message)

    async def _query(self, message: Query) -> None:
        try:
            answer = await answer_query(self._service, self._client, message)
        except Refused as error:
            answer = rpc.Failed(message.call, code_of(error), str(error), error.retry_after_s)
        self._writer.put(answer)
        self._queries.discard(message.call)
        self._finish_if_drained()


def code_of(error: Refused) -> rpc.Code:
    """Return a refusal's code as one that may be sent."""
    return cast("rpc.Code", error.code)
