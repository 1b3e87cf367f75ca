"""Frames and streams as state machines: whatever the order and the splits, nothing is lost."""

import struct
from itertools import pairwise

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

import kvlease
from kvlease.errors import ConnectionLost
from kvlease.protocols import rpc
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import Usage
from kvlease.runtime.request import TokenEvent
from kvlease.services.rpc.answers import RemoteAnswer
from kvlease.services.rpc.framing import (
    HIGH_WATER_BYTES,
    FrameError,
    FrameReader,
    FrameWriter,
    append_frame,
)
from kvlease.services.rpc.streams import OutStreams
from tests.rpc.rig import open_server, prompt_of, until
from tests.runtime.rig import cancel_at_every_checkpoint

STEPS = st.lists(
    st.tuples(st.sampled_from(["tokens", "credit", "send", "end"]), st.integers(0, 2),
              st.integers(1, 6)),
    max_size=60,
)  # fmt: skip
decode = msgspec.msgpack.Decoder(rpc.ServerMessage).decode


def messages_of(buffer: bytearray) -> list[rpc.ServerMessage]:
    found: list[rpc.ServerMessage] = []
    while buffer:
        length = int.from_bytes(buffer[:4], "big")
        found.append(decode(bytes(buffer[4 : 4 + length])))
        del buffer[: 4 + length]
    return found


@given(STEPS)
def test_credit_order_and_ends_hold_in_every_interleaving(
    steps: list[tuple[str, int, int]],
) -> None:
    """Tokens come in order, never more than credit, and the end is last and once."""
    out = OutStreams(lambda: None)
    streams = [out.open(call, 0, logprobs=call == 2) for call in range(3)]
    made, credit, got = [0] * 3, [0] * 3, [0] * 3
    ended, seen_end = set[int](), set[int]()

    def send() -> None:
        buffer = bytearray()
        out.refill(buffer)
        for message in messages_of(buffer):
            if isinstance(message, rpc.Tokens):
                for piece in message.pieces:
                    tokens = struct.unpack(f"<{len(piece.tokens) // 4}i", piece.tokens)
                    first = got[piece.call]
                    assert piece.start == first
                    assert tokens == tuple(range(first, first + len(tokens)))
                    assert piece.call not in seen_end
                    if piece.call == 2:
                        assert piece.logprobs == [float(token) for token in tokens]
                    got[piece.call] += len(tokens)
            else:
                assert isinstance(message, rpc.Ended)
                assert message.call not in seen_end
                seen_end.add(message.call)
                assert got[message.call] == made[message.call]

    for what, call, count in steps:
        if what == "tokens" and call not in ended:
            events = [TokenEvent(n, n, float(n)) for n in range(made[call], made[call] + count)]
            made[call] += count
            streams[call].listen(tuple(events))
        elif what == "credit":
            credit[call] += count
            streams[call].give(count)
        elif what == "end" and call not in ended:
            ended.add(call)
            streams[call].end(rpc.Ended(call, "stop", Usage(prompt=1)))
        elif what == "send":
            send()
        assert all(g <= c for g, c in zip(got, credit, strict=True))
    send()
    for call in range(3):
        assert got[call] == min(made[call], credit[call])
        assert (call in seen_end) == (call in ended and got[call] == made[call])


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_any_split_of_a_stream_gives_the_same_frames(
    bodies: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    bounds = [0, *cuts, len(whole)]
    chunks = [whole[a:b] for a, b in pairwise(bounds) if b > a]

    async def run() -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        reader = FrameReader(ours, max_bytes=40, frame_timeout_s=5, idle_timeout_s=5)
        got: list[bytes] = []

        async def feed() -> None:
            for chunk in chunks:
                await theirs.send_all(chunk)
                await trio.lowlevel.checkpoint()
            await theirs.send_eof()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed)
            while frames := await reader.receive():
                got += frames
        assert got == bodies
        assert reader.nbytes == len(whole)

    trio.run(run)


async def test_frames_that_wait_too_long_or_are_too_long_are_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    for sent, code in ((b"", "idle"), (b"\0\0", "idle"), (b"\0\0\0\x05abc", "idle"),
                       (b"\0\0\0\x0b", "too_large")):  # fmt: skip
        ours, theirs = trio.testing.memory_stream_pair()
        reader = FrameReader(ours, max_bytes=10, frame_timeout_s=3, idle_timeout_s=7)
        await theirs.send_all(sent or b"\0\0\0\0")
        before = trio.current_time()
        with pytest.raises(FrameError) as caught:
            while True:
                await reader.receive()
        assert caught.value.code == code
        waited = {b"": 7, b"\0\0\0\x0b": 0}.get(sent, 3)
        assert trio.current_time() - before == pytest.approx(waited)


async def test_the_writer_puts_together_what_is_ready_and_ends_with_its_last_message() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    refills = [b"one", b"two"]

    def refill(buffer: bytearray) -> None:
        if refills:
            append_frame(rpc.Failed(1, "failed", refills.pop(0).decode()), buffer)

    writer = FrameWriter(ours, timeout_s=5, refill=refill)
    writer.put(rpc.Pong(1))
    writer.put(rpc.Pong(2))
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.run)
            await trio.testing.wait_all_tasks_blocked()
            first = bytearray(await theirs.receive_some())
            writer.finish(rpc.Goodbye("draining", "bye"))
            writer.put(rpc.Pong(3))
        second = bytearray(await theirs.receive_some())
    names = [type(message).__name__ for message in messages_of(first)]
    assert names[:3] == ["Pong", "Pong", "Failed"]
    assert [type(message).__name__ for message in messages_of(second)][-1] == "Goodbye"


@pytest.mark.parametrize(
    "piece",
    [
        rpc.Piece(1, 0, b""),
        rpc.Piece(1, 0, b"abc"),
        rpc.Piece(1, 0, bytes(8), [0.5]),
        rpc.Piece(1, 0, bytes(4), [0.5], []),
    ],
)
async def test_a_server_that_sends_no_tokens_is_lost_to_its_client(piece: rpc.Piece) -> None:
    answer = RemoteAnswer(1, 8, None, lambda _: None)
    answer.feed(rpc.Piece(1, 0, bytes(4)))
    answer.feed(piece)
    answer.feed(rpc.Piece(1, 1, bytes(4)))
    with pytest.raises(ConnectionLost, match="that are none"):
        await answer.drain()
    assert answer.tokens == [0]


async def test_who_waits_for_room_is_let_go_when_the_connection_breaks() -> None:
    """A call that waits to be sent behind a great many others may not wait for ever."""
    mine, theirs = trio.testing.memory_stream_pair()
    writer = FrameWriter(mine, timeout_s=60)
    writer.put(rpc.Evict(1, bytes(2 * HIGH_WATER_BYTES)))
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.room)
            await trio.testing.wait_all_tasks_blocked()
            await theirs.aclose()
            with pytest.raises(trio.BrokenResourceError):
                await writer.run()


async def test_a_client_may_be_cancelled_at_every_checkpoint() -> None:
    """Whenever its task is cancelled, the server gets everything back, and the next one works."""
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    async with open_server() as server:

        async def trial() -> None:
            async with kvlease.connect(server.address) as client:
                async with client.generate(prompt_of(1), params, window=8) as answer:
                    assert len((await answer.drain()).tokens) == 70
                await client.health()

        async def check(_was_cancelled: bool) -> None:
            await until(lambda: not (server.service.clients or server.service.num_streams))

        assert await cancel_at_every_checkpoint(trial, check) > 10
        assert not server.service.refused
