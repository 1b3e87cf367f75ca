"""Tenants of one engine: equal prompts share nothing, in no tier, and nobody waits for a neighbour.

A shared page, or a wait for one, would tell a tenant what another has asked.
"""

import pytest
import trio

from kvlease.errors import DeadlineExceeded
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import Event, RequestAdmitted, StepDone
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.request import GenerateResult, TokenEvent
from kvlease.services.replay.checker import check
from tests.runtime.toy import COLD, PAGE, answer, prompt_of, same, toy_config, toy_model

PARAMS = SamplingParams(max_tokens=4)
PROMPT = prompt_of(1, 6 * PAGE + 5)


async def ask(engine: Engine, salt: bytes, prompt: list[int] = PROMPT) -> GenerateResult:
    async with engine.generate(prompt, PARAMS, salt=salt) as stream:
        return await stream.drain()


async def test_equal_prompts_of_two_tenants_share_no_page_in_any_tier() -> None:
    """PEERS: a salt has to reach every tier. Device and host hits stay zero across tenants."""
    log = EventLog(level="audit", flush_every_s=3600)
    events: list[Event] = log.remember()
    async with open_engine(toy_model(), toy_config(device_pages=24), log=log) as engine:
        first = await ask(engine, b"blue")
        assert (await ask(engine, b"blue")).usage.hit_device == 6 * PAGE
        for seed in range(100, 104):  # push everything of blue to the host
            await ask(engine, b"blue", prompt_of(seed, 6 * PAGE))
        assert (await ask(engine, b"blue")).usage.hit_host
        for salt in (b"green", b""):
            other = await ask(engine, salt)
            assert other.usage.hit_device == other.usage.hit_host == 0
            assert other.usage.computed == len(PROMPT)
            assert same(other, first)
            assert (await ask(engine, salt)).usage.hit_device
        assert same(first, await COLD.answer(PROMPT, PARAMS))
        assert engine.statistics().ledger_ok
    log.close()
    identities = {e.identity for e in events if isinstance(e, RequestAdmitted)}
    assert len(identities) == 3
    assert check(events).verdict == "clean"


async def test_nobody_waits_for_a_prefill_of_another_tenant() -> None:
    """Who asks what another tenant is computing is admitted at once and computes it too."""
    log = EventLog(level="audit", flush_every_s=3600)
    events: list[Event] = log.remember()
    config = toy_config(chunk_tokens=PAGE)
    async with open_engine(toy_model(), config, log=log) as engine:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for salt in (b"blue", b"green"):
                    nursery.start_soon(ask, engine, salt)
    log.close()
    admitted = [place for place, e in enumerate(events) if isinstance(e, RequestAdmitted)]
    between = events[admitted[0] : admitted[1]]
    assert sum(isinstance(event, StepDone) for event in between) <= 1


async def test_a_flush_holds_for_every_tenant() -> None:
    """R10: after new weights no tenant gets a page that the old ones made."""
    async with open_engine(toy_model(), toy_config()) as engine:
        await ask(engine, b"blue")
        await engine.flush()
        assert (await ask(engine, b"blue")).usage.hit_device == 0


async def test_a_fork_stays_with_its_tenant() -> None:
    """A branch finds its parent's pages, and nobody else's."""
    async with open_engine(toy_model(), toy_config()) as engine:
        async with engine.generate(PROMPT, PARAMS, salt=b"blue") as stream:
            await stream.drain()
            async with engine.fork(stream) as branch:
                assert (await branch.drain()).usage.hit_device
        assert (await ask(engine, b"green")).usage.hit_device == 0


async def test_a_request_may_end_sooner_than_the_engine_wants() -> None:
    """R9: the deadline that a caller gave is the one that counts."""
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    with trio.fail_after(20):
        async with (
            open_engine(toy_model(), toy_config(device_pages=120)) as engine,
            engine.generate([1, 2, 3], params, timeout_s=0.05) as stream,
        ):
            with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
                await stream.drain()


async def test_a_listener_hears_every_token_in_order() -> None:
    """Tokens that went to a listener are those of the answer; the stream has none of them."""
    heard: list[TokenEvent] = []
    async with open_engine(toy_model(), toy_config()) as engine:
        async with engine.generate(PROMPT, PARAMS, listener=heard.extend) as stream:
            result = await stream.drain()
        assert tuple(event.token for event in heard) == result.tokens
        assert [event.index for event in heard] == list(range(4))
        assert same(await answer(engine, PROMPT, PARAMS), result)


async def test_the_ledger_can_be_read_without_a_recount() -> None:
    """A scrape every few seconds must not walk every page."""
    async with open_engine(toy_model(), toy_config()) as engine:
        await ask(engine, b"")
        quick, whole = engine.statistics(recount=False), engine.statistics()
        assert quick == whole
