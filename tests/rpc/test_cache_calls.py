"""Prefetch, pin, evict and cache events over a connection, and that tenants stay apart."""

import os
from pathlib import Path

import pytest
import trio

import kvlease
from kvlease.errors import Refused
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.identity import page_hash
from kvlease.runtime.engine import open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.services.rpc.address import UnixAddress
from kvlease.services.rpc.client import Client
from kvlease.services.rpc.door import RpcDoor, open_listeners
from kvlease.services.serving.limits import Limits
from kvlease.services.serving.service import Service
from kvlease.services.serving.tenants import Tenant, Tenants, salt_of
from tests.rpc.rig import SECRET, config_of, open_server, pack, prompt_of, until

PAGE = 64
SMALL = config_of(device_pages=20, host_pages=64, cache_events=1000)
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
PROMPT = prompt_of(1, 4 * PAGE + 5)
TWO = tuple(
    Tenant(name, SECRET + name.encode(), salt_of(name.encode())) for name in ("blue", "green")
)


async def ask(client: Client, prompt: list[int]) -> tuple[int, int]:
    """Return how many tokens were hit on the device, and on the host."""
    async with client.generate(prompt, PARAMS) as answer:
        usage = (await answer.drain()).usage
    return usage.hit_device, usage.hit_host


async def crowd_out(client: Client) -> None:
    for number in range(10, 18):
        await ask(client, prompt_of(number, 4 * PAGE))


async def test_prefetch_pin_evict_and_unpin() -> None:
    async with open_server(config=SMALL) as server, kvlease.connect(server.address) as client:
        assert await ask(client, PROMPT) == (0, 0)
        await crowd_out(client)
        warm = await client.prefetch(PROMPT)
        assert warm.tokens == warm.moved_tokens == 4 * PAGE
        pin = await client.pin(PROMPT, 3600.0)
        assert pin.tokens == 4 * PAGE
        await crowd_out(client)
        assert await ask(client, PROMPT) == (4 * PAGE, 0)
        assert (await client.evict(PROMPT[:1])).kept_pages >= 4
        assert await client.unpin(pin.pin)
        assert not await client.unpin(pin.pin)
        out = await client.evict(PROMPT[:1])
        assert (out.device_pages, out.kept_pages) == (4, 0)
        assert await ask(client, PROMPT) == (0, 0)
        with pytest.raises(Refused, match="nothing") as caught:
            await client.pin(prompt_of(99, 200), 1.0)
        assert caught.value.code == "busy"


async def test_cache_events_follow_every_page() -> None:
    async with open_server(config=SMALL) as server, kvlease.connect(server.address) as client:
        async with client.changes() as changes:
            await until(lambda: changes.last is not None)
            await ask(client, PROMPT)
            key, keys = server.engine._core.root, []
            for start in range(0, 4 * PAGE, PAGE):
                key = page_hash(key, pack(PROMPT[start : start + PAGE]))
                keys.append(key)
            with trio.fail_after(10):
                sealed = b""
                while len(sealed) < 64:
                    event = await changes.__anext__()
                    if event.change == "sealed":
                        sealed += event.keys
        assert sealed == b"".join(keys)
        channel = server.engine.cache.changes()
        await until(lambda: not channel.listeners or len(server.service.clients) == 1)


async def test_a_subscription_goes_on_over_a_broken_connection_without_a_gap() -> None:
    async with open_server(config=SMALL) as server, kvlease.connect(server.address) as client:
        channel = server.engine.cache.changes()
        async with client.changes() as changes:
            await until(lambda: changes.last is not None)
            await ask(client, PROMPT)
            link = await client.link()
            await trio.aclose_forcefully(link._stream)
            await until(lambda: link.lost is not None)
            await crowd_out(client)
            await until(lambda: not server.engine._core.transfers)
            await until(lambda: changes.last == channel.last)
            numbers = [(await changes.__anext__()).number for _ in range(channel.last)]
        assert numbers == list(range(1, channel.last + 1))
        assert (changes.lost, changes.restarts) == (0, 0)
        assert client.num_connections == 2


async def test_who_comes_too_late_is_told_what_is_lost() -> None:
    config = config_of(device_pages=20, host_pages=64, cache_events=5)
    async with open_server(config=config) as server, kvlease.connect(server.address) as client:
        await ask(client, PROMPT)
        await crowd_out(client)
        await until(lambda: not server.engine._core.transfers)
        channel = server.engine.cache.changes()
        async with client.changes(since=0) as changes:
            await until(lambda: changes.last == channel.last)
            first = await changes.__anext__()
        assert changes.lost == channel.last - 5
        assert first.number == channel.last - 4


async def test_another_run_of_the_server_is_noticed() -> None:
    async with (
        open_server(config=SMALL) as server,
        kvlease.connect(server.address) as client,
        client.changes() as changes,
    ):
        await until(lambda: changes.last is not None)
        await ask(client, PROMPT)
        await until(lambda: changes.last)
        server.service.incarnation = "another"
        await trio.aclose_forcefully((await client.link())._stream)
        await until(lambda: changes.restarts == 1)
        await until(lambda: changes.last == server.engine.cache.changes().last)


async def test_a_subscription_goes_on_when_the_server_is_replaced(tmp_path: Path) -> None:
    """The old server drains and says goodbye; the new one's events follow, and it shows."""
    where, log = UnixAddress(str(tmp_path / "k")), EventLog(level="off")
    async with open_engine(None, SMALL, log=log) as engine, trio.open_nursery() as nursery:
        old, new = (Service(engine, Tenants(), Limits(), log) for _ in range(2))
        old_door = RpcDoor(old, await open_listeners(where))
        nursery.start_soon(old_door.run)
        async with kvlease.connect(str(where)) as client, client.changes() as changes:
            await until(lambda: changes.last is not None)
            with trio.fail_after(10):
                await old.drain()
            await until(lambda: not os.path.exists(where.path))
            nursery.start_soon(RpcDoor(new, await open_listeners(where)).run)
            await ask(client, PROMPT)
            await until(lambda: changes.last == engine.cache.changes().last)
            assert changes.restarts == 1
        nursery.cancel_scope.cancel()


async def test_a_cancelled_subscription_ends_and_one_without_events_is_refused() -> None:
    async with (
        open_server(config=config_of()) as server,
        kvlease.connect(server.address) as client,
        client.changes() as changes,
    ):
        with trio.fail_after(5), pytest.raises(Refused, match="cache_events"):
            await changes.__anext__()
    async with open_server(config=SMALL) as server:
        raw = await server.raw()
        await raw.shake()
        with trio.fail_after(5):
            await raw.send([28, 7, None, 10])
            assert (await raw.receive())[:4] == [48, 7, 0, []]
            await raw.send([18, 7])
            assert (await raw.receive())[:3] == [34, 7, "cancelled"]


async def test_a_subscription_that_goes_on_is_not_told_that_it_failed() -> None:
    """A `Failed` of its number would be its last message: the connection ends instead."""
    async with open_server(config=SMALL) as server:
        raw = await server.raw()
        await raw.shake()
        with trio.fail_after(5):
            await raw.send([28, 7, None, 10])
            assert (await raw.receive())[:2] == [48, 7]
            await raw.send([17, 7, "many"])
            assert (await raw.receive())[:2] == [3, "protocol"]


async def test_two_tenants_share_nothing_over_rpc() -> None:
    """Equal prompts: no hit in any tier, no pin, no eviction, no event of the other's."""
    async with (
        open_server(config=SMALL, tenants=TWO) as server,
        kvlease.connect(server.address, tenant="blue", secret=SECRET + b"blue") as blue,
        kvlease.connect(server.address, tenant="green", secret=SECRET + b"green") as green,
        green.changes() as changes,
    ):
        await until(lambda: changes.last is not None)
        assert await ask(blue, PROMPT) == (0, 0)
        assert await ask(blue, PROMPT) == (4 * PAGE, 0)
        pin = await blue.pin(PROMPT, 60.0)
        assert not await green.unpin(pin.pin)
        assert (await green.evict([])).device_pages == 0
        assert (await green.prefetch(PROMPT)).tokens == 0
        assert changes.last == 0
        assert await ask(green, PROMPT) == (0, 0)
        for call in (green.flush, green.drain, green.statistics):
            with pytest.raises(Refused, match="admin"):
                await call()
        assert await ask(blue, PROMPT) == (4 * PAGE, 0)
