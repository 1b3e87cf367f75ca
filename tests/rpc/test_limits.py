"""Limits that hold: over one of them there is a refusal at once, and nobody else notices."""

import pytest
import trio

import kvlease
from kvlease.errors import Refused
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import RpcCall, RpcClose
from kvlease.services.rpc.answers import RemoteAnswer
from kvlease.services.rpc.client import Client
from kvlease.services.serving.tenants import Tenant
from tests.rpc.rig import SECRET, config_of, open_server, pack, prompt_of, until

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


async def refused(client: Client, prompt: list[int]) -> Refused:
    """Return why a prompt was not answered; it has to be told at once."""
    with trio.fail_after(5), pytest.raises(Refused) as caught:
        async with client.generate(prompt, LONG) as answer:
            await answer.drain()
    return caught.value


async def stalled(client: Client, nursery: trio.Nursery, number: int) -> RemoteAnswer:
    """Open an answer that is never read, and so stays one of the streams."""

    async def hold(task_status: trio.TaskStatus[RemoteAnswer]) -> None:
        async with client.generate(prompt_of(number), LONG, window=1) as answer:
            task_status.started(answer)
            await trio.sleep_forever()

    answer: RemoteAnswer = await nursery.start(hold)
    return answer


@pytest.mark.parametrize(
    ("of_client", "in_all", "name"),
    [(3, 9, "max_streams_per_client"), (9, 3, "(max_streams)")],
)
async def test_streams_have_a_bound(of_client: int, in_all: int, name: str) -> None:
    async with (
        open_server(max_streams_per_client=of_client, max_streams=in_all) as server,
        kvlease.connect(server.address) as client,
        trio.open_nursery() as nursery,
    ):
        for number in range(3):
            await stalled(client, nursery, number)
        await until(lambda: server.service.num_streams == 3)
        error = await refused(client, prompt_of(9))
        assert error.code == "too_many"
        assert name in str(error)
        assert error.retry_after_s is not None
        nursery.cancel_scope.cancel()


async def test_a_tenant_has_a_bound_of_its_own() -> None:
    """One tenant at its bound keeps no other one out, and other connections do not get round it."""
    tenants = (
        Tenant("blue", SECRET + b"1", b"1", max_streams=1),
        Tenant("green", SECRET + b"2", b"2"),
    )
    async with (
        open_server(tenants=tenants) as server,
        kvlease.connect(server.address, tenant="blue", secret=SECRET + b"1") as first,
        kvlease.connect(server.address, tenant="blue", secret=SECRET + b"1") as second,
        kvlease.connect(server.address, tenant="green", secret=SECRET + b"2") as other,
        trio.open_nursery() as nursery,
    ):
        await stalled(first, nursery, 1)
        await until(lambda: server.service.num_streams == 1)
        assert "tenant's max_streams" in str(await refused(second, prompt_of(2)))
        async with other.generate(prompt_of(3), LONG) as answer:
            await answer.drain()
        with pytest.raises(Refused, match="admin"):
            await other.statistics()
        nursery.cancel_scope.cancel()


async def test_a_full_queue_is_told_with_advice() -> None:
    config = config_of(compute="model", max_sessions=1, max_queue=1, device_pages=64)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    async with (
        open_server(config=config) as server,
        kvlease.connect(server.address) as client,
        client.generate([1], params) as running,
    ):
        await running.__anext__()
        async with client.generate([2], params):
            await until(lambda: server.engine.statistics(recount=False).waiting == 1)
            error = await refused(client, [3])
        assert error.code == "busy"
        assert error.retry_after_s is not None
        assert error.retry_after_s >= 0.1


async def test_a_prompt_that_is_too_long_is_refused() -> None:
    async with open_server(max_prompt_tokens=50) as server, kvlease.connect(server.address) as c:
        assert (await refused(c, prompt_of(1, 51))).code == "too_large"
        async with c.generate(prompt_of(1, 50), LONG) as answer:
            await answer.drain()


async def test_a_frame_that_is_too_long_ends_the_connection() -> None:
    async with open_server(max_frame_bytes=1000) as server:
        raw = await server.raw()
        await raw.shake()
        with trio.fail_after(5):
            await raw.send([16, 1, b"x" * 1001, {}, 10])
            assert (await raw.receive())[:2] == [3, "too_large"]
            assert await raw.receive() is None


async def test_a_frame_has_an_end() -> None:
    """A slow writer inside a frame is sent away in its time, however busily it drips."""
    async with open_server(frame_timeout_s=0.2) as server:
        raw = await server.raw()
        await raw.shake()
        with trio.fail_after(5):
            await raw.stream.send_all(b"\0\0\1\0")
            for _ in range(100):
                try:
                    await raw.stream.send_all(b"x")
                except trio.BrokenResourceError:
                    break
                if not server.service.clients:
                    break
                await trio.sleep(0.02)
            await until(lambda: not server.service.clients)
        assert [e.reason for e in server.events if isinstance(e, RpcClose)] == ["idle"]


async def test_a_silent_client_is_sent_away_and_one_that_pings_stays() -> None:
    async with (
        open_server(idle_timeout_s=1.5) as server,
        kvlease.connect(server.address) as client,
    ):
        silent = await server.raw()
        await silent.shake()
        with trio.fail_after(5):
            assert (await silent.receive())[:2] == [3, "idle"]
            await trio.sleep(1.0)
            assert (await client.health()).status == "serving"
        assert client.num_connections == 1


async def test_a_slow_reader_stops_only_itself() -> None:
    """Without credit nothing more of its answer is sent, and its neighbours are served whole."""
    async with (
        open_server() as server,
        kvlease.connect(server.address) as client,
        client.generate(prompt_of(1), LONG, window=10) as slow,
    ):
        await slow.__anext__()
        with trio.fail_after(10):
            for number in range(5):
                async with client.generate(prompt_of(number), LONG) as answer:
                    assert len((await answer.drain()).tokens) == 400
        assert len(slow.tokens) <= 10
        assert not slow.is_over
        await until(lambda: server.service.num_streams == 1)
        assert server.engine.statistics().running == 0
        assert len((await slow.drain()).tokens) == 400


async def test_an_answer_that_nobody_takes_is_dropped_in_its_time() -> None:
    """R9: a reader that never comes back costs a stream for no longer than this."""
    async with open_server(slow_reader_timeout_s=0.2) as server:
        raw = await server.raw()
        await raw.shake()
        await raw.send([16, 1, pack(prompt_of(1)), {"max_tokens": 50}, 5])
        with trio.fail_after(5):
            received = 0
            while (message := await raw.receive_of(32, 34))[0] == 32:
                received += sum(len(piece[2]) // 4 for piece in message[1])
            assert message[1:3] == [1, "slow_reader"]
            assert received == 5
        await until(lambda: not server.service.num_streams)
        assert [e.code for e in server.events if isinstance(e, RpcCall)] == ["slow_reader"]


async def test_who_reads_nothing_at_all_is_disconnected() -> None:
    """A full socket ends the connection in its time, and what it had asked for with it."""
    async with open_server(write_timeout_s=0.3) as server:
        raw = await server.raw()
        await raw.shake()
        params = {"max_tokens": 16000, "ignore_eos": True}
        for call in range(1, 301):
            await raw.send([16, call, pack([call]), params, 1 << 30])
        await until(lambda: not server.service.clients)
        assert [e.reason for e in server.events if isinstance(e, RpcClose)] == ["slow_reader"]


async def test_a_flood_of_questions_is_held_back() -> None:
    """Pings are answered no faster than they are read: memory stays bounded."""
    async with open_server(write_timeout_s=0.5) as server:
        raw = await server.raw()
        await raw.shake()
        with trio.move_on_after(3):
            try:
                for _ in range(2000):
                    await raw.stream.send_all(b"\0\0\0\x0b\x92\x13\xcf\0\0\0\0\0\0\0\1" * 1000)
            except trio.BrokenResourceError:
                pass
        await until(lambda: not server.service.clients)
