"""What users ask of the cache: prefetch, pin, evict, quotas, and hearing what happens to pages."""

import time
from array import array
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define

from kvlease.errors import ConfigError, PagesUnavailable, PromptError, TransferFailed
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.events import PageLedger, PageUnpin
from kvlease.protocols.identity import page_hash
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.cache_feed import Channel
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.request import GenerateResult
from kvlease.services.replay.checker import check
from tests.runtime.toy import COLD, PAGE, FaultyCopier, prompt_of, same, toy_config, toy_model

PARAMS = SamplingParams(max_tokens=4)
PROMPT = prompt_of(1, 6 * PAGE + 5)


def packed(prompt: list[int]) -> bytes:
    return array("i", prompt).tobytes()


@asynccontextmanager
async def open_checked(
    config: EngineConfig, ports: EnginePorts | None = None
) -> AsyncGenerator[Engine]:
    """Open an engine whose ledger and log have to be clean at the end."""
    log = EventLog(level="audit", flush_every_s=3600)
    events = log.remember()
    with trio.fail_after(30):
        async with open_engine(toy_model(), config, log=log, ports=ports) as engine:
            yield engine
            statistics = engine.statistics()
            assert statistics.ledger_ok, statistics.ledger_error
    log.close()
    verdict = check(events)
    assert verdict.verdict == "clean", verdict


@define
class AheadClock:
    """The wall's clock, and as far ahead of it as a test likes."""

    ahead_s: float = 0.0

    def now(self) -> float:
        return time.perf_counter() + self.ahead_s


async def ask(engine: Engine, prompt: list[int], salt: bytes = b"") -> GenerateResult:
    async with engine.generate(prompt, PARAMS, salt=salt) as stream:
        return await stream.drain()


async def crowd_out(engine: Engine, seeds: range, salt: bytes = b"") -> None:
    """Fill the device with other prompts."""
    for seed in seeds:
        await ask(engine, prompt_of(seed, 6 * PAGE), salt)


async def test_a_prefetch_makes_the_next_request_find_its_prefix_on_the_device() -> None:
    async with open_checked(toy_config(device_pages=24)) as engine:
        await ask(engine, PROMPT)
        await crowd_out(engine, range(100, 104))
        first = await engine.cache.prefetch(packed(PROMPT))
        assert first.tokens == 6 * PAGE
        assert first.moved_tokens > 0
        again = await engine.cache.prefetch(packed(PROMPT))
        assert (again.tokens, again.moved_tokens) == (6 * PAGE, 0)
        loads = engine.statistics().counters.restored_bytes
        result = await ask(engine, PROMPT)
        assert (result.usage.hit_device, result.usage.hit_host) == (6 * PAGE, 0)
        assert same(result, await COLD.answer(PROMPT, PARAMS))
        # What is left to copy is the tail at its end, from device to device.
        assert (
            engine.statistics().counters.restored_bytes - loads <= engine.model.schema.tail_nbytes
        )


async def test_a_prefetch_brings_the_state_at_the_end_too() -> None:
    """Where the device has few slots for kept tails, the one that a prefix ends in comes along."""
    config = toy_config(device_pages=24, device_tails=4, max_sessions=1)
    async with open_checked(config) as engine:
        await ask(engine, PROMPT)
        await crowd_out(engine, range(100, 104))
        assert not has_tail_on_device(engine)
        assert (await engine.cache.prefetch(packed(PROMPT))).tokens == 6 * PAGE
        assert has_tail_on_device(engine)
        result = await ask(engine, PROMPT)
        assert result.usage.hit_device == 6 * PAGE
        assert same(result, await COLD.answer(PROMPT, PARAMS))


def has_tail_on_device(engine: Engine) -> bool:
    core = engine._core
    match = core.pool.match(core.root, packed(PROMPT), 6)
    held = match.tail is not None and match.tail.device.slot is not None
    core.pool.drop(match)
    return held


async def test_a_prefetch_to_the_host_saves_what_was_on_the_device_alone() -> None:
    async with open_checked(toy_config(device_pages=24, write_policy="back")) as engine:
        await ask(engine, PROMPT)
        assert engine.cache.share("host") == 0
        result = await engine.cache.prefetch(packed(PROMPT), "host")
        assert result.moved_tokens == 6 * PAGE
        assert engine.cache.share("host") == 6
        assert (await engine.cache.prefetch(packed(PROMPT), "host")).moved_tokens == 0


async def test_a_prefetch_of_nothing_moves_nothing() -> None:
    async with open_checked(toy_config()) as engine:
        result = await engine.cache.prefetch(packed(PROMPT))
        assert (result.tokens, result.moved_tokens) == (0, 0)
        with pytest.raises(PromptError):
            await engine.cache.prefetch(b"abc")


async def test_a_prefetch_whose_bytes_do_not_come_says_so_and_leaks_nothing() -> None:
    """R9: a failed transfer is told; the prefix is computed anew when it is asked for."""
    broken = [False]

    def fault(order: CopyOrder) -> int | None:
        if broken[0] and order.kind == "load":
            raise OSError("the link is down")
        return None

    ports = EnginePorts(copier=FaultyCopier(fault))
    async with open_checked(toy_config(device_pages=24), ports) as engine:
        await ask(engine, PROMPT)
        await crowd_out(engine, range(100, 104))
        broken[0] = True
        with pytest.raises(TransferFailed):
            await engine.cache.prefetch(packed(PROMPT))
        broken[0] = False
        assert same(await ask(engine, PROMPT), await COLD.answer(PROMPT, PARAMS))


async def test_a_pinned_prefix_stays_until_its_time_is_up() -> None:
    clock = AheadClock()
    config = toy_config(device_pages=24, host_pages=0)
    async with open_checked(config, EnginePorts(clock=clock)) as engine:
        await ask(engine, PROMPT)
        pin = await engine.cache.pin(packed(PROMPT), 3600.0)
        assert pin.tokens == 6 * PAGE
        await crowd_out(engine, range(100, 106))
        assert (await ask(engine, PROMPT)).usage.hit_device == 6 * PAGE
        clock.ahead_s = 3600.0
        assert not await engine.cache.unpin(pin.pin)
        await crowd_out(engine, range(106, 112))
        assert (await ask(engine, PROMPT)).usage.hit_device == 0


async def test_a_pin_can_be_ended_by_its_tenant_only() -> None:
    async with open_checked(toy_config(device_pages=24, host_pages=0)) as engine:
        await ask(engine, PROMPT, b"blue")
        pin = await engine.cache.pin(packed(PROMPT), 60.0, salt=b"blue")
        assert not await engine.cache.unpin(pin.pin, salt=b"green")
        assert await engine.cache.unpin(pin.pin, salt=b"blue")
        assert not await engine.cache.unpin(pin.pin, salt=b"blue")
        await crowd_out(engine, range(100, 106))
        assert (await ask(engine, PROMPT, b"blue")).usage.hit_device == 0


async def test_pins_have_bounds_and_an_end() -> None:
    async with open_checked(toy_config(device_pages=24, host_pages=0)) as engine:
        with pytest.raises(PagesUnavailable, match="nothing"):
            await engine.cache.pin(packed(PROMPT), 1.0)
        for seconds in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(PromptError, match="up to 1000000000: every pin has an end"):
                await engine.cache.pin(packed(PROMPT), seconds)
        await ask(engine, PROMPT)
        for _ in range(2):
            await engine.cache.pin(packed(PROMPT), 60.0)
        with pytest.raises(PagesUnavailable, match="18 pages in 3 pins"):
            await engine.cache.pin(packed(PROMPT), 60.0)


async def test_a_pin_ends_with_the_engine_however_long_that_waits_for_copies() -> None:
    """Its scheduler, which would end it in time, has gone before the last copies return."""
    log = EventLog(level="audit", flush_every_s=3600)
    events = log.remember()
    async with open_engine(toy_model(), toy_config(), log=log) as engine:
        await ask(engine, PROMPT)
        await engine.cache.pin(packed(PROMPT), 3600.0)
    log.close()
    assert [event.reason for event in events if isinstance(event, PageUnpin)] == ["closed"]
    assert not any(event.pins for event in events if isinstance(event, PageLedger))
    assert check(events).verdict == "clean"


async def test_a_tenant_pins_no_more_than_half_of_its_quota() -> None:
    """One tenant's pins leave the others their part of the pool."""
    async with open_checked(toy_config()) as engine:
        for salt in (b"blue", b"green"):
            await ask(engine, PROMPT, salt)
        await engine.cache.set_quota(b"blue", device_pages=11)
        with pytest.raises(PagesUnavailable, match="6 of this tenant's"):
            await engine.cache.pin(packed(PROMPT), 60.0, salt=b"blue")
        await engine.cache.set_quota(b"blue", device_pages=12)
        assert (await engine.cache.pin(packed(PROMPT), 60.0, salt=b"blue")).tokens == 6 * PAGE
        assert (await engine.cache.pin(packed(PROMPT), 60.0, salt=b"green")).tokens == 6 * PAGE


async def test_a_flush_ends_every_pin() -> None:
    async with open_checked(toy_config()) as engine:
        await ask(engine, PROMPT)
        pin = await engine.cache.pin(packed(PROMPT), 60.0)
        await engine.flush()
        assert engine.statistics().device.sealed == engine.statistics().host.sealed == 0
        assert not await engine.cache.unpin(pin.pin)
        assert (await ask(engine, PROMPT)).usage.hit_device == 0


async def test_an_eviction_by_prefix_takes_what_begins_so_and_nothing_else() -> None:
    """Two prompts share three pages; evicting one's own beginning leaves the other whole."""
    first, second = prompt_of(1, 6 * PAGE + 5, 3 * PAGE), prompt_of(2, 6 * PAGE + 5, 3 * PAGE)
    async with open_checked(toy_config(tail_every=1)) as engine:
        await ask(engine, first)
        await ask(engine, second)
        out = await engine.cache.evict(packed(first[: 3 * PAGE + 1]))
        assert (out.device_pages, out.kept_pages) == (3, 0)
        assert out.host_pages == 3
        assert (await ask(engine, second)).usage.hit_device == 6 * PAGE
        assert (await ask(engine, first)).usage.hit_device == 3 * PAGE


@pytest.mark.parametrize("length", [0, 1, PAGE, PAGE + 1, 2 * PAGE, 6 * PAGE, 6 * PAGE + 5])
async def test_every_length_of_prefix_is_cut_at_its_page(length: int) -> None:
    """The page that holds the prefix's last token goes, and all behind it; those before stay."""
    async with open_checked(toy_config(tail_every=1)) as engine:
        await ask(engine, PROMPT)
        out = await engine.cache.evict(packed(PROMPT[:length]))
        kept = max(0, length - 1) // PAGE
        assert out.device_pages == max(0, 6 - kept)
        assert (await ask(engine, PROMPT)).usage.hit_device == min(kept, 6) * PAGE


async def test_an_eviction_leaves_what_is_pinned_and_what_another_tenant_has() -> None:
    async with open_checked(toy_config()) as engine:
        for salt in (b"blue", b"green"):
            await ask(engine, PROMPT, salt)
        pin = await engine.cache.pin(packed(PROMPT), 60.0, salt=b"blue")
        out = await engine.cache.evict(b"", salt=b"blue")
        assert out.device_pages == out.host_pages == 0
        assert out.kept_pages >= 6
        await engine.cache.unpin(pin.pin, salt=b"blue")
        assert (await engine.cache.evict(b"", "device", salt=b"blue")).device_pages == 6
        assert engine.cache.share("device", salt=b"blue") == 0
        assert engine.cache.share("host", salt=b"blue") == 6
        assert (await ask(engine, PROMPT, b"green")).usage.hit_device == 6 * PAGE


async def test_a_quota_takes_a_tenants_own_pages_and_nobody_elses() -> None:
    async with open_checked(toy_config(device_pages=64, host_pages=128)) as engine:
        await ask(engine, PROMPT, b"green")
        await engine.cache.set_quota(b"blue", device_pages=10, host_pages=8)
        await crowd_out(engine, range(100, 106), b"blue")
        await engine.cache.evict(packed([1, 2, 3]), salt=b"blue")  # one more turn of the scheduler
        assert engine.cache.share("device", salt=b"blue") <= 10
        assert engine.cache.share("host", salt=b"blue") <= 8
        assert (await ask(engine, PROMPT, b"green")).usage.hit_device == 6 * PAGE
        assert (await ask(engine, prompt_of(105, 6 * PAGE), b"blue")).usage.hit_device > 0


async def test_changes_are_told_with_keys_that_anybody_can_compute() -> None:
    """Sealed, stored, evicted, restored: by the chained hash of the whole prefix."""
    config = toy_config(device_pages=24, cache_events=1000)
    async with open_checked(config) as engine:
        await ask(engine, PROMPT)
        channel = engine.cache.changes()
        key, keys = engine._core.root, []
        for start in range(0, 6 * PAGE, PAGE):
            key = page_hash(key, packed(PROMPT[start : start + PAGE]))
            keys.append(key)
        await crowd_out(engine, range(100, 104))
        await engine.cache.prefetch(packed(PROMPT))
        seen = {change: told(channel, change) for change in ("sealed", "stored", "evicted")}
        for change in seen:
            assert set(keys) & seen[change], change
        assert told(channel, "restored") <= seen["evicted"] & seen["sealed"]
        assert set(keys) <= seen["sealed"] & seen["stored"]
        assert balance(channel, "device") == engine.cache.share("device")
        assert balance(channel, "host") == engine.cache.share("host")


def told(channel: Channel, change: str) -> set[bytes]:
    events = [event for event in channel.after(0, 1 << 20) if event.change == change]
    return {event.keys[i : i + 16] for event in events for i in range(0, len(event.keys), 16)}


def balance(channel: Channel, tier: str) -> int:
    """Pages that came to a tier, less those that left it."""
    return sum(
        (-1 if event.change == "evicted" else 1) * len(event.keys) // 16
        for event in channel.after(0, 1 << 20)
        if event.tier == tier
    )


async def test_a_tenant_hears_of_its_own_pages_only() -> None:
    async with open_checked(toy_config(cache_events=1000)) as engine:
        await ask(engine, PROMPT, b"blue")
        blue, green = (engine.cache.changes(salt=salt) for salt in (b"blue", b"green"))
        assert blue.last > 0
        assert green.last == 0


async def test_without_cache_events_there_is_nothing_to_follow() -> None:
    async with open_checked(toy_config()) as engine:
        with pytest.raises(ConfigError, match="cache_events"):
            engine.cache.changes()


def test_a_channel_keeps_its_latest_events_and_says_what_it_lost() -> None:
    channel = Channel(3)
    for number in range(5):
        channel.note("sealed", "device", bytes([number]) * 16)
    assert (channel.last, channel.lost) == (5, 2)
    assert [event.number for event in channel.after(0, 10)] == [3, 4, 5]
    assert [event.number for event in channel.after(3, 1)] == [4]
    assert channel.after(5, 10) == []
