"""Hostile clients: garbage, half frames, sudden deaths. Nothing crashes, leaks, or spreads."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import kvlease
from kvlease.errors import ConnectionLost, Refused
from kvlease.protocols import rpc
from kvlease.protocols.config import SamplingParams
from kvlease.services.rpc.connection import Connection
from kvlease.services.rpc.handshake import answer_greeting, greeting, judge_hello, judge_verdict
from kvlease.services.rpc.streams import OutStream
from kvlease.services.serving.tenants import Tenant, Tenants
from tests.rpc.raw import Raw, Value, frame
from tests.rpc.raw import pack as packed
from tests.rpc.rig import SECRET, Server, config_of, open_server, pack, prompt_of, until

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
TENANTS = Tenants([Tenant(secret=SECRET)])
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats() | st.binary()
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)  # fmt: skip
BODIES = st.binary(max_size=200) | NESTED.map(packed)


@given(BODIES)
def test_no_bytes_raise_anything_undeclared_before_the_secret_is_proven(body: bytes) -> None:
    greeted = greeting(TENANTS)
    trials: list[Callable[[], object]] = [
        lambda: judge_hello(body, greeted, TENANTS),
        lambda: answer_greeting(body, "", SECRET),
        lambda: judge_verdict(body, greeted, rpc.Hello(1, "", bytes(32), b""), SECRET),
    ]
    for trial in trials:
        try:
            trial()
        except Refused:
            continue
        raise AssertionError("nobody proves a secret by chance")


@given(st.lists(NESTED, max_size=6).map(lambda items: packed([1, *items])))
def test_no_hello_of_any_shape_raises_anything_undeclared(body: bytes) -> None:
    with pytest.raises(Refused) as caught:
        judge_hello(body, greeting(TENANTS), TENANTS)
    assert caught.value.code in ("protocol", "version", "unauthorized")


def some_value(rng: random.Random, depth: int = 0) -> Value:
    """Make anything that MessagePack can hold."""
    kind = rng.randrange(10 if depth < 4 else 7)
    if kind == 7:
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    if kind == 8:
        return {str(n): some_value(rng, depth + 1) for n in range(rng.randrange(4))}
    if kind == 9:
        return {"max_tokens": rng.randrange(-1, 9), "temperature": some_value(rng, 9)}
    return [
        None, True, rng.randrange(-5, 40), rng.randrange(1 << 63), rng.random() * 1e9,
        rng.randbytes(rng.randrange(40) * 4), "device",
    ][kind]  # fmt: skip


def some_frame(rng: random.Random) -> bytes:
    """Make a frame: right, nearly right, or noise."""
    kind = rng.randrange(6)
    number = rng.randrange(16, 29)
    call = rng.randrange(1 << 40)
    if kind == 0:
        return rng.randbytes(rng.randrange(60))
    if kind == 1:
        return rng.randrange(100).to_bytes(4, "big") + rng.randbytes(rng.randrange(100))
    if kind == 2:
        prompt = pack([rng.randrange(300) for _ in range(rng.randrange(80))])
        params = {"max_tokens": rng.randrange(1, 50), "ignore_eos": True}
        return frame([16, call, prompt, params, rng.randrange(100)])
    whole = bytearray(frame([number, call, *(some_value(rng) for _ in range(rng.randrange(5)))]))
    if kind == 3:
        for _ in range(rng.randrange(1, 4)):
            whole[rng.randrange(len(whole))] = rng.randrange(256)
    return bytes(whole)


async def vandal(server: Server, rng: random.Random) -> int:
    """Throw frames at a connection until it is closed; returns how many."""
    sent = 0
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    async with stream, trio.open_nursery() as nursery:

        async def read() -> None:
            try:
                while await stream.receive_some(65536):
                    pass
            except trio.BrokenResourceError:
                pass
            nursery.cancel_scope.cancel()

        raw = Raw(stream)
        if rng.random() < 0.9:
            await raw.shake()
        nursery.start_soon(read)
        try:
            for _ in range(rng.randrange(1, 60)):
                await stream.send_all(some_frame(rng))
                sent += 1
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await trio.sleep(rng.random() * 0.01)
        nursery.cancel_scope.cancel()
    return sent


@pytest.mark.slow
async def test_garbage_ends_its_own_connection_and_nothing_else(fuzz_seconds: float) -> None:
    """CI runs it for --fuzz-seconds 60. A well-behaved client is served all the time."""
    seed = time.time_ns()
    rng = random.Random(seed)
    config = config_of(cache_events=50)
    nobody = [Tenant()]  # no administrator: bytes that by chance ask for a drain would be given it
    end_s = trio.current_time() + fuzz_seconds
    async with open_server(config=config, tenants=nobody, frame_timeout_s=1.0) as server:
        async with kvlease.connect(server.address) as client:
            rounds = frames = 0
            while trio.current_time() < end_s:
                with trio.fail_after(20):
                    async with trio.open_nursery() as nursery:
                        for _ in range(4):
                            nursery.start_soon(vandal, server, random.Random(rng.random()))
                    async with client.generate(prompt_of(rounds), LONG) as answer:
                        assert len((await answer.drain()).tokens) == 200, seed
                rounds += 1
                frames += 4
            assert client.num_connections == 1
        await until(lambda: not server.service.clients)
        assert not server.service.refused["internal"], seed
        server.events.clear()
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) in (Connection, OutStream)]
    assert not left, "connections outlive their clients"
    assert rounds > 0


async def test_clients_that_die_take_nobody_with_them(is_full: bool) -> None:
    """A fifth of the clients break off at a random moment; the others have every token.

    With --full 500 streams at a time, for a minute.
    """
    clients, streams = (100, 5) if is_full else (15, 4)
    rng = random.Random(7)
    config = config_of(device_pages=2048, host_pages=0, max_sessions=64)
    async with open_server(config=config) as server:
        whole: list[int] = []

        async def one_client(number: int, dies_after_s: float | None) -> None:
            async with kvlease.connect(server.address) as client, trio.open_nursery() as nursery:
                if dies_after_s is not None:
                    nursery.start_soon(die, client, dies_after_s)
                for place in range(streams):
                    nursery.start_soon(one_stream, client, number * streams + place)

        async def die(client: kvlease.Client, after_s: float) -> None:
            link = await client.link()
            await trio.sleep(after_s)
            await trio.aclose_forcefully(link._stream)

        async def one_stream(client: kvlease.Client, number: int) -> None:
            try:
                async with client.generate(prompt_of(number), LONG) as answer:
                    whole.append(len((await answer.drain()).tokens))
            except ConnectionLost:
                return

        end_s = trio.current_time() + (60 if is_full else 0)
        rounds = 0
        while not rounds or trio.current_time() < end_s:
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for number in range(clients):
                        dies = rng.random() * 0.3 if number % 5 == 0 else None
                        nursery.start_soon(one_client, number, dies)
            rounds += 1
        assert set(whole) == {200}
        assert len(whole) >= rounds * clients * streams * 4 // 5


async def test_a_frame_of_deep_nesting_is_no_recursion() -> None:
    async with open_server() as server:
        raw = await server.raw()
        await raw.shake()
        for body in (b"\x91" * 200_000, b"\x93\x10\x01" + b"\x91" * 200_000, b"\x81\xa1x" * 60_000):
            raw = await server.raw()
            await raw.shake()
            with trio.fail_after(10):
                await raw.stream.send_all(len(body).to_bytes(4, "big") + body)
                assert (await raw.receive())[0] in (3, 34)


async def test_lengths_that_lie_take_no_memory() -> None:
    """A header that promises four billion items is believed by nobody."""
    lies = [b"\xdd\xff\xff\xff\xff", b"\x93\x10\x01\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"]
    async with open_server() as server:
        for body in lies:
            raw = await server.raw()
            await raw.shake()
            with trio.fail_after(10):
                await raw.stream.send_all(len(body).to_bytes(4, "big") + body)
                assert (await raw.receive())[0] in (3, 34)


def test_every_message_survives_its_own_bytes() -> None:
    encode = msgspec.msgpack.encode
    decode = msgspec.msgpack.Decoder(rpc.ClientMessage).decode
    for message in (
        rpc.Generate(1, b"abcd", SamplingParams(max_tokens=3), 5, 1.5),
        rpc.Evict(2, b"", None),
        rpc.Subscribe(3, 4, 5),
    ):
        assert decode(encode(message)) == message
