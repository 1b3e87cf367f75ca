"""The audit: changed pages are caught before the first token, named, dropped and computed again."""

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import torch
import trio

from kvlease.pools.audit import tail_place
from kvlease.pools.prefix_node import TIERS, CacheTier
from kvlease.pools.prefix_results import Match
from kvlease.protocols.config import EngineConfig, SamplingParams, WritePolicy
from kvlease.protocols.events import Event, PageMismatch, RequestPreempted
from kvlease.protocols.identity import page_hash
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.request import GenerateResult
from kvlease.units import LayerId
from tests.runtime.test_gate import PARTS, make_host_only
from tests.runtime.toy import (
    COLD,
    PAGE,
    FaultyCopier,
    answer,
    prompt_of,
    random_delays,
    same,
    toy_config,
    toy_model,
)

PARAMS = SamplingParams(max_tokens=4)
PROMPT = prompt_of(1, 6 * PAGE + 5)
SPANS = {(layer.id, span.name) for layer in toy_model().schema.layers for span in layer.spans}


@asynccontextmanager
async def audited(
    config: EngineConfig, ports: EnginePorts | None = None
) -> AsyncIterator[tuple[Engine, list[Event]]]:
    log = EventLog(level="normal")
    events = log.remember()
    async with open_engine(toy_model(), config, log=log, ports=ports) as engine:
        yield engine, events
        final = engine.statistics()
        assert final.ledger_ok, final.ledger_error
        assert_sums_go_with_pages(engine)


@contextmanager
def matched(engine: Engine, prompt: list[int]) -> Iterator[Match]:
    """Find what the cache has of a prompt, as admission does."""
    core = engine._core
    tokens = b"".join(token.to_bytes(4, "little") for token in prompt)
    match = core.pool.match(core.root, tokens, (len(prompt) - 1) // PAGE)
    yield match
    core.pool.drop(match)


def bytes_of(
    engine: Engine, match: Match, number: int, layer: int, name: str
) -> tuple[torch.Tensor, int]:
    """Return the bytes that the next reader is served from, and which page they belong to."""
    memory = engine._core.pool.memory
    if (layer, name) not in SPANS:
        assert match.tail is not None
        tier, slot = tail_place(match.tail)
        tails = memory.tails if tier == "device" else memory.host_tails
        return tails.kept(LayerId(layer), name)[slot].view(torch.uint8), match.num_pages - 1
    page = match.pages[number]
    if page >= 0:
        return memory.spans.rows(LayerId(layer), name)[page].view(torch.uint8), number
    node = next(node for node in match.to_load if node.start <= number < node.end)
    assert node.host.pages is not None
    page = node.host.pages[number - node.start]
    return memory.host_spans.rows(LayerId(layer), name)[page].view(torch.uint8), number


def flip_one_bit(rows: torch.Tensor, rng: random.Random) -> None:
    """Flip a bit of the last row, which every reader of the page or the tail reads."""
    assert rows.is_contiguous()
    row = rows.flatten(0, -2)[-1]
    row[rng.randrange(len(row))] ^= 1 << rng.randrange(8)


def assert_sums_go_with_pages(engine: Engine) -> None:
    """At rate 1 every copy that the index holds has its sums, and nothing else has."""
    pool = engine._core.pool
    if engine.config.audit_rate != 1.0:
        return
    assert pool.audit is not None
    holdings, book = pool.index.check(), pool.audit.book
    for tier in TIERS:
        assert set(book.pages[tier]) == set(holdings.pages[tier])
        assert set(book.tails[tier]) == set(holdings.tails[tier])


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("layer", "component"), PARTS)
async def test_a_flipped_bit_is_caught_named_and_computed_again(
    tier: CacheTier, layer: int, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of a stored copy (K237), in the bytes themselves and not beside them (K239).

    The request is not to blame: with no restart of its own to spare it gets its answer all the
    same, and the next one is served from what was computed again.
    """
    monkeypatch.setattr("kvlease.runtime.settlement.MAX_RESTARTS", 0)
    rng = random.Random(f"{tier} {layer} {component}")
    pages = 64 if tier == "device" else 24
    async with audited(toy_config(device_pages=pages, audit_rate=1.0)) as (engine, events):
        if tier == "device":
            await answer(engine, PROMPT, PARAMS)
            await trio.testing.wait_all_tasks_blocked(0.02)
        else:
            await make_host_only(engine, PROMPT)
        with matched(engine, PROMPT) as match:
            assert match.num_pages == 6
            assert match.host_pages == (0 if tier == "device" else 6)
            rows, number = bytes_of(engine, match, rng.randrange(6), layer, component)
            flip_one_bit(rows, rng)
        assert not [event for event in events if isinstance(event, PageMismatch)]
        result = await answer(engine, PROMPT, PARAMS)
        assert same(result, await COLD.answer(PROMPT, PARAMS))
        found = [event for event in events if isinstance(event, PageMismatch)]
        assert [(e.layer, e.component) for e in found] == [(layer, component)]
        assert [count for _, count, _ in found[0].pages] == [1]
        preempted = [e for e in events if isinstance(e, RequestPreempted)]
        assert [(e.request, e.reason) for e in preempted] == [(found[0].request, "page_mismatch")]
        assert result.usage.hit_device + result.usage.hit_host <= number * PAGE
        counters = engine.statistics().counters
        assert counters.audit_mismatches == 1
        assert counters.audited_pages >= 6
        again = await answer(engine, PROMPT, PARAMS)
        assert same(again, result)
        assert again.usage.hit_device == 6 * PAGE
        assert engine.statistics().counters.audit_mismatches == 1


async def test_without_the_audit_the_changed_page_reaches_the_answer() -> None:
    """What the tests above change is read: with the check off the answer is garbled."""
    for layer, component in PARTS:
        async with audited(toy_config(audit_rate=0.0)) as (engine, _):
            await answer(engine, PROMPT, PARAMS)
            await trio.testing.wait_all_tasks_blocked(0.02)
            with matched(engine, PROMPT) as match:
                rows, _ = bytes_of(engine, match, 5, layer, component)
                rows.random_(generator=torch.Generator().manual_seed(layer))
                rows.view(torch.float32).nan_to_num_(1.0, 2.0, -2.0).clamp_(-2.0, 2.0)
            assert not same(await answer(engine, PROMPT, PARAMS), await COLD.answer(PROMPT, PARAMS))
            counters = engine.statistics().counters
            assert (counters.audited_pages, counters.audit_mismatches) == (0, 0)


async def test_rows_that_changed_places_and_pages_under_the_wrong_prefix_are_caught() -> None:
    """Every row is right, and stands where another should: so do whole pages."""
    async with audited(toy_config(audit_rate=1.0)) as (engine, events):
        await answer(engine, PROMPT, PARAMS)
        spans = engine._core.pool.memory.spans
        with matched(engine, PROMPT) as match:
            rows = spans.rows(LayerId(1), "latent")[match.pages[2]]
            rows[[0, 3]] = rows[[3, 0]]
        assert same(await answer(engine, PROMPT, PARAMS), await COLD.answer(PROMPT, PARAMS))
        with matched(engine, PROMPT) as match:
            node = match.cursor.node
            assert node.device.pages is not None
            assert node.num_pages >= 3
            node.device.pages[:2] = node.device.pages[1::-1]
            engine._core.pool.index.touch(match.cursor)
        assert same(await answer(engine, PROMPT, PARAMS), await COLD.answer(PROMPT, PARAMS))
        found = [event for event in events if isinstance(event, PageMismatch)]
        assert [(e.layer, e.component) for e in found] == [(1, "latent"), (0, "key"), (0, "key")]


@pytest.mark.parametrize("kind", ["load", "store"])
async def test_a_copier_that_spoils_what_it_copies_ends_in_recompute(kind: str) -> None:
    """Every copy is spoiled, for ever: slower, never wrong, never stuck."""

    def fault(order: CopyOrder) -> int | None:
        layers = [part.layer for part in order.parts if part.component == "latent"]
        if order.kind != kind or not layers:
            return None
        memory = engine._core.pool.memory
        store = memory.spans if kind == "load" else memory.host_spans
        rows = store.rows(LayerId(layers[0]), "latent")
        before = rows.clone()
        moved = order.run()
        # Bits, because poison is not equal to itself.
        changed = (rows.view(torch.int32) != before.view(torch.int32)).flatten(1).any(dim=1)
        rows[changed.nonzero().flatten()[-1]].neg_()
        return moved

    config = toy_config(device_pages=24, audit_rate=1.0)
    async with audited(config, EnginePorts(copier=FaultyCopier(fault))) as (engine, events):
        await make_host_only(engine, PROMPT)
        for _ in range(3):
            with trio.fail_after(20):
                result = await answer(engine, PROMPT, PARAMS)
            assert same(result, await COLD.answer(PROMPT, PARAMS))
            await make_host_only(engine, PROMPT)
        found = [event for event in events if isinstance(event, PageMismatch)]
        assert found
        assert {event.component for event in found} == {"latent"}


async def test_all_readers_of_a_changed_page_start_over() -> None:
    """Who was checked before the page changed is not left to go on with it."""
    long = SamplingParams(max_tokens=150, ignore_eos=True)
    async with audited(toy_config(audit_rate=1.0)) as (engine, events):
        await answer(engine, PROMPT, PARAMS)
        async with engine.generate(PROMPT, long) as stream:
            async for event in stream:
                if event.index == 2:
                    break
            with matched(engine, PROMPT) as match:
                # The last rows of a page that is no longer in anybody's window: the reader's own
                # tokens are those of a run in which they had these values from here on.
                rows, _ = bytes_of(engine, match, 1, 2, "latent")
                flip_one_bit(rows, random.Random(0))
            result = await answer(engine, PROMPT, PARAMS)
            assert same(result, await COLD.answer(PROMPT, PARAMS))
            rest = await stream.drain()
            assert len(rest.tokens) == 150
        spoiled = [e for e in events if isinstance(e, RequestPreempted)]
        assert {e.reason for e in spoiled} <= {"page_mismatch", "step_failed"}
        assert len({e.request for e in spoiled if e.reason == "page_mismatch"}) == 2
        assert engine.statistics().counters.failed == 0


async def sampled_keys(rate: float, prompts: list[list[int]]) -> set[bytes]:
    async with audited(toy_config(audit_rate=rate)) as (engine, _):
        for prompt in prompts:
            await answer(engine, prompt, PARAMS)
        pool = engine._core.pool
        assert pool.audit is not None
        sums = pool.audit.book.pages["device"]
        held = pool.index.check().pages["device"]
        assert set(sums) <= set(held)
        assert 0 < len(sums) < len(held)
        return {one.key for one in sums.values()}


async def test_a_page_is_sampled_by_its_key_and_so_on_every_run() -> None:
    prompts = [prompt_of(seed, 5 * PAGE + 3, 2 * PAGE) for seed in range(8)]
    first = await sampled_keys(0.3, prompts)
    assert first == await sampled_keys(0.3, list(reversed(prompts)))
    assert first < await sampled_keys(0.7, prompts)
    model = toy_model()
    async with audited(toy_config(audit_rate=0.3)) as (engine, _):
        root = engine._core.root
    keys: set[bytes] = set()
    for prompt in prompts:
        key = root
        for number in range(5):
            page = prompt[number * PAGE : (number + 1) * PAGE]
            key = page_hash(key, b"".join(token.to_bytes(4, "little") for token in page))
            keys.add(key)
    assert first == {key for key in keys if int.from_bytes(key[:8], "big") < round(0.3 * 2**64)}
    assert model.schema.page_tokens == PAGE


async def test_no_false_alarm_without_arithmetic() -> None:
    """A decode step fills a page with tokens that only its end tells."""
    config = EngineConfig(
        compute="none", device_pages=12, host_pages=40, tail_every=1, audit_rate=1.0
    )
    async with open_engine(None, config) as engine:
        vocab, page = engine.model.vocab_size, engine.model.schema.page_tokens
        params = SamplingParams(max_tokens=2 * page, ignore_eos=True)
        for number in [*range(6), *range(6)]:
            prompt = [(number * 37 + place) % vocab for place in range(2 * page + 7)]
            first = await answer(engine, prompt, params)
            again = await answer(engine, [*prompt, *first.tokens, 1], params)
            assert again.usage.hit_device + again.usage.hit_host > 2 * page
        await trio.testing.wait_all_tasks_blocked(0.02)
        counters = engine.statistics().counters
        assert counters.audit_mismatches == 0
        assert counters.hit_host > 0
        assert counters.audited_pages >= 12
        assert_sums_go_with_pages(engine)


@pytest.mark.parametrize("policy", ["through", "selective", "back"])
async def test_no_false_alarm_under_pressure(policy: WritePolicy, is_full: bool) -> None:
    """Shared prefixes, evictions, restores, preemptions and delays; 40 requests, or 80 with --full.

    Answers are long enough that those who run together do not fit, whatever order they come in.
    """
    num_sessions = 20 if is_full else 10
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    config = toy_config(
        device_pages=32,
        host_pages=90,
        max_sessions=6,
        audit_rate=1.0,
        write_policy=policy,
        load_timeout_s=60.0,
        request_timeout_s=300.0,
    )
    ports = EnginePorts(copier=FaultyCopier(random_delays(1, 0.002)))
    results: list[tuple[list[int], GenerateResult]] = []
    async with audited(config, ports) as (engine, events):

        async def session(number: int) -> None:
            rng = random.Random(number)
            prompt = prompt_of(number, 60 + rng.randrange(40), 48)
            for turn in range(4):
                result = await answer(engine, prompt, params)
                results.append((prompt, result))
                prompt = [*prompt, *result.tokens, *prompt_of(100 * turn + number, 10)]
                if rng.random() < 0.2:
                    prompt = prompt[: 70 + rng.randrange(20)]

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for number in range(num_sessions):
                    nursery.start_soon(session, number)
        counters = engine.statistics().counters
        assert len(results) == 4 * num_sessions
        assert not [event for event in events if isinstance(event, PageMismatch)]
        assert counters.audit_mismatches == 0
        assert counters.audited_pages > 4 * num_sessions
        assert counters.hit_device > 0
        if policy == "through":  # the others store what the order of events makes them store
            assert counters.preempted > 0
            assert counters.hit_host > 0
        await engine.flush()
        with trio.fail_after(60):
            # The last stores are forgotten when they end; nobody tells of the last one.
            while engine._core.transfers:  # noqa: ASYNC110
                await trio.sleep(0.01)
        pool = engine._core.pool
        assert pool.audit is not None
        assert not any(pool.audit.book.pages.values())
        assert not any(pool.audit.book.tails.values())
    for prompt, result in results[::10]:
        assert same(result, await COLD.answer(prompt, params))
