"""Draining: no new calls, no lost token, an end within a limit, and everybody is told."""

import pytest
import trio

import kvlease
from kvlease.errors import Refused
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import RpcClose, RpcDrain
from kvlease.services.rpc.answers import RemoteAnswer
from tests.rpc.rig import config_of, open_server, prompt_of, until

PARAMS = SamplingParams(max_tokens=100, ignore_eos=True)
CONFIG = config_of(compute="model", device_pages=128)


async def test_a_drain_loses_no_token_and_refuses_what_is_new() -> None:
    async with open_server(config=CONFIG) as server:
        async with (
            kvlease.connect(server.address) as client,
            kvlease.connect(server.address) as admin,
            trio.open_nursery() as nursery,
        ):
            got: dict[int, int] = {}

            async def one(number: int, task_status: trio.TaskStatus[None]) -> None:
                async with client.generate(prompt_of(number, 20), PARAMS) as answer:
                    await answer.__anext__()
                    task_status.started()
                    got[number] = len((await answer.drain()).tokens)

            for number in range(4):
                await nursery.start(one, number)
            assert not got
            with trio.fail_after(30):
                nursery.start_soon(admin.drain)
                await until(lambda: server.service.status == "draining")
                for who in (client, admin):
                    with pytest.raises(Refused) as caught:
                        async with who.generate([1], PARAMS) as answer:
                            await answer.drain()
                    assert caught.value.code == "draining"
                with pytest.raises(Refused) as caught:
                    async with kvlease.connect(server.address):
                        pass
                assert caught.value.code == "draining"
                await server.service.drained.wait()
        assert got == dict.fromkeys(range(4), 100)
    drains = [(e.state, e.cut) for e in server.events if isinstance(e, RpcDrain)]
    assert drains == [("begin", 0), ("end", 0)]
    reasons = {e.reason for e in server.events if isinstance(e, RpcClose)}
    assert reasons <= {"draining", "closed", "lost"}


async def test_a_drain_has_an_end() -> None:
    """What is not over within the limit is cut short, and says so after the tokens it has."""
    async with (
        open_server(config=CONFIG, drain_timeout_s=0.2) as server,
        kvlease.connect(server.address) as client,
        kvlease.connect(server.address) as admin,
    ):
        params = SamplingParams(max_tokens=1500, ignore_eos=True)
        async with client.generate([1, 2, 3], params) as answer:
            await answer.__anext__()
            with trio.fail_after(10):
                assert await admin.drain() == 1
                with pytest.raises(Refused) as caught:
                    await answer.drain()
        assert caught.value.code == "draining"
        assert answer.tokens


async def test_a_slow_reader_cannot_hold_a_drain_up() -> None:
    async with (
        open_server(drain_timeout_s=0.3) as server,
        kvlease.connect(server.address) as client,
        client.generate(prompt_of(1), PARAMS, window=10) as answer,
    ):
        await answer.__anext__()
        with trio.fail_after(10):
            assert (await server.service.drain()).cut == 1


async def test_a_drain_ends_although_whoever_asked_has_gone() -> None:
    """Otherwise a server whose admin loses the connection refuses everybody for ever."""
    async with open_server(config=CONFIG) as server, kvlease.connect(server.address) as client:
        async with client.generate([1, 2, 3], PARAMS) as answer:
            await answer.__anext__()
            async with kvlease.connect(server.address) as admin, trio.open_nursery() as nursery:
                nursery.start_soon(admin.drain)
                await until(lambda: server.service.status == "draining")
                nursery.cancel_scope.cancel()
            await until(lambda: len(server.service.clients) == 1)
            with trio.fail_after(20):
                assert len((await answer.drain()).tokens) == 100
                await server.service.drained.wait()
        assert (await server.service.drain()).is_whole


async def test_an_idle_server_drains_at_once_and_tells_its_clients() -> None:
    async with open_server() as server:
        raw = await server.raw()
        await raw.shake()
        with trio.fail_after(2):
            assert (await server.service.drain()).is_whole
            assert (await raw.receive())[:2] == [3, "draining"]
            assert await raw.receive() is None
        await until(lambda: not server.service.clients)


async def test_tokens_that_were_ready_are_sent_before_the_goodbye() -> None:
    """A reader that gives its credit late, but in time, has every token."""
    async with (
        open_server(drain_timeout_s=5.0) as server,
        kvlease.connect(server.address) as client,
    ):

        async def read(answer: RemoteAnswer) -> None:
            await until(lambda: server.service.status == "draining")
            assert len((await answer.drain()).tokens) == 100

        async with (
            client.generate(prompt_of(1), PARAMS, window=10) as answer,
            trio.open_nursery() as nursery,
        ):
            await answer.__anext__()
            nursery.start_soon(read, answer)
            assert (await server.service.drain()).is_whole
