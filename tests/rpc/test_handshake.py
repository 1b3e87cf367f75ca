"""Who is let in: a proof of the secret first, and nothing else is read before that."""

import pytest
import trio

import kvlease
from kvlease.errors import ConfigError, Refused
from kvlease.protocols.events import RpcOpen, RpcRefused
from kvlease.services.serving.tenants import Tenant, Tenants, salt_of
from tests.rpc.raw import frame
from tests.rpc.rig import SECRET, Server, connect_and_reset, open_server, prompt_of, until

ONE = (Tenant(secret=SECRET, is_admin=True),)
TWO = tuple(
    Tenant(name, SECRET + name.encode(), salt_of(name.encode())) for name in ("blue", "green")
)


def refusals(server: Server) -> list[str]:
    return [event.code for event in server.events if isinstance(event, RpcRefused)]


async def test_the_right_secret_is_let_in_and_never_travels() -> None:
    async with open_server(tenants=ONE) as server:
        async with kvlease.connect(server.address, secret=SECRET) as client:
            assert (await client.health()).status == "serving"
        assert not refusals(server)


@pytest.mark.parametrize("secret", [b"", b"another secret of sixteen bytes", SECRET + b"x"])
async def test_a_wrong_secret_is_refused(secret: bytes) -> None:
    async with open_server(tenants=ONE) as server:
        with trio.fail_after(5), pytest.raises(Refused) as caught:
            async with kvlease.connect(server.address, secret=secret):
                pass
        assert caught.value.code == "unauthorized"
        assert not [event for event in server.events if isinstance(event, RpcOpen)]


async def test_a_secret_that_the_server_does_not_know_is_refused_by_the_client() -> None:
    """Mutual: a client that was told a secret does not talk to a server that asks for none."""
    async with open_server() as server:
        with trio.fail_after(5), pytest.raises(Refused, match="not ours"):
            async with kvlease.connect(server.address, secret=SECRET):
                pass


async def test_tenants_have_names_and_secrets_of_their_own() -> None:
    async with open_server(tenants=TWO) as server:
        for name, secret, code in (
            ("blue", SECRET + b"blue", None),
            ("green", SECRET + b"blue", "unauthorized"),
            ("red", SECRET + b"blue", "unauthorized"),
            ("", SECRET + b"blue", "unauthorized"),
        ):
            raw = await server.raw()
            with trio.fail_after(5):
                verdict = await raw.shake(secret, name)
            assert verdict[0] == (2 if code is None else 3)
            assert code is None or verdict[1] == code


async def test_an_old_proof_is_worth_nothing() -> None:
    """Replaying a handshake that was heard fails: the server's nonce is another one."""
    async with open_server(tenants=ONE) as server:
        first = await server.raw()
        heard: list[object] = []

        async def spy(value: object) -> None:
            heard.append(value)
            await first.stream.send_all(frame(value))

        first.send = spy  # type: ignore[method-assign]
        assert (await first.shake(SECRET))[0] == 2
        second = await server.raw()
        await second.receive()
        await second.send(heard[0])
        verdict = await second.receive()
        assert verdict[:2] == [3, "unauthorized"]


async def test_another_version_is_refused() -> None:
    async with open_server() as server:
        raw = await server.raw()
        with trio.fail_after(5):
            verdict = await raw.shake(version=2)
            assert verdict[:2] == [3, "version"]
            assert await raw.receive() is None
        assert refusals(server) == ["version"]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "too_large"),
        (b"\0\0\4\1" + b"x" * 1025, "too_large"),
        (frame([16, 1, b"", {}]), "protocol"),
        (frame([1, 1, "", b"short", b""]), "protocol"),
        (frame("hello"), "protocol"),
        (b"\0\0\0\0", "protocol"),
    ],
    ids=["http", "oversize", "a call", "short nonce", "no array", "empty"],
)
async def test_anything_but_a_hello_is_turned_away(sent: bytes, code: str) -> None:
    async with open_server(tenants=ONE) as server:
        raw = await server.raw()
        with trio.fail_after(5):
            await raw.receive()
            await raw.stream.send_all(sent)
            verdict = await raw.receive()
            assert verdict[:2] == [3, code]
            assert await raw.receive() is None
        assert refusals(server) == [code]


@pytest.mark.parametrize("sent", [b"", b"\0", b"\0\0\0\x40abc"], ids=["nothing", "a byte", "part"])
async def test_a_handshake_has_an_end(sent: bytes) -> None:
    """Half-open connections and slow writers are sent away in their time."""
    async with open_server(handshake_timeout_s=0.1) as server:
        raw = await server.raw()
        with trio.fail_after(5):
            await raw.receive()
            await raw.stream.send_all(sent)
            assert (await raw.receive())[:2] == [3, "idle"]
            assert await raw.receive() is None


async def test_a_slow_writer_gains_nothing_by_a_byte_at_a_time() -> None:
    async with open_server(handshake_timeout_s=0.2) as server:
        raw = await server.raw()
        await raw.receive()
        with trio.fail_after(5):
            try:
                for byte in frame([1, 1, "", b"n" * 32, b""]) * 100:
                    await raw.stream.send_all(bytes([byte]))
                    await trio.sleep(0.03)
            except trio.BrokenResourceError:
                pass
        assert refusals(server)[0] == "idle"
        assert server.door.num_unknown == 0


async def test_who_has_not_proven_himself_keeps_nobody_out() -> None:
    """As many half-open connections as there may be clients: the next one is told at once."""
    async with open_server(max_connections=3, handshake_timeout_s=1.0) as server:
        silent = [await server.raw() for _ in range(3)]
        for raw in silent:
            await raw.receive()
        late = await server.raw()
        with trio.fail_after(5):
            assert (await late.receive())[:2] == [3, "too_many"]
            for raw in silent:
                assert (await raw.receive())[1] == "idle"
            async with kvlease.connect(server.address) as client:
                assert (await client.health()).status == "serving"


async def test_who_has_gone_before_being_accepted_is_nobody() -> None:
    """A socket that was reset while it waited has no peer, which ends no server."""
    async with open_server() as server:
        connect_and_reset(server.port, 5)
        async with kvlease.connect(server.address) as client:
            assert (await client.health()).status == "serving"


async def test_one_client_too_many_is_told_so_with_advice() -> None:
    async with open_server(max_connections=2) as server:
        async with kvlease.connect(server.address), kvlease.connect(server.address):
            with pytest.raises(Refused, match="max_connections") as caught:
                async with kvlease.connect(server.address):
                    pass
            assert (caught.value.code, caught.value.retry_after_s) == ("too_many", 1.0)
        await until(lambda: not server.service.clients)
        async with (
            kvlease.connect(server.address) as client,
            client.generate(prompt_of(1)) as answer,
        ):
            await answer.drain()


async def test_what_is_no_server_of_ours_is_told_apart() -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        with trio.fail_after(5), pytest.raises(Refused, match="no kvlease server"):
            async with kvlease.connect(f"tcp://127.0.0.1:{port}"):
                pass
        nursery.cancel_scope.cancel()


def test_tenants_that_could_be_mixed_up_are_refused() -> None:
    a = Tenant("a", SECRET, b"1")
    for other in (
        Tenant("a", SECRET + b"2", b"2"),
        Tenant("b", SECRET, b"2"),
        Tenant("b", SECRET + b"2", b"1"),
        Tenant("b"),
    ):
        with pytest.raises(ConfigError):
            Tenants([a, other])
    with pytest.raises(ConfigError, match="16 or more"):
        Tenant("a", b"short")


def test_a_secret_is_not_printed() -> None:
    assert "secret" not in repr(Tenant("a", SECRET, SECRET))
