"""C13: two different states under one key, or one state under two."""

import itertools
import subprocess
import sys

import hypothesis.strategies as st
import pytest
import trio
from attrs import evolve, fields
from hypothesis import given, settings

from kvlease.protocols.config import SamplingParams
from kvlease.protocols.identity import CacheIdentity, page_hash
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import open_engine
from tests.museum.rig import MLA, PAGE, Bench, tokens_of
from tests.runtime.test_engine import assert_whole, at_rest
from tests.runtime.toy import (
    COLD,
    FaultyCopier,
    Hold,
    answer,
    prompt_of,
    same,
    toy_config,
    toy_model,
)

PARAMS = SamplingParams(max_tokens=4)
PROMPT = prompt_of(1, 100)
BASE = CacheIdentity("weights", "schema")
NAMES = [each.name for each in fields(CacheIdentity)]


def with_value(name: str, value: str) -> CacheIdentity:
    """Return the base identity with one field set to (the encoding of) a value."""
    encoded: object = value
    if name == "tenant_salt":
        encoded = value.encode()
    elif name == "weights_version":
        encoded = 1 + int.from_bytes(value.encode()[:4], "big")
    return evolve(BASE, **{name: encoded})  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", [*itertools.combinations(NAMES, 2)], ids="-".join)
@given(value=st.text(st.characters(codec="ascii"), min_size=1, max_size=8))
@settings(max_examples=15)
def test_one_value_in_two_fields_gives_two_keys(pair: tuple[str, str], value: str) -> None:
    """K195 vllm#44701 (F17): an adapter's name equal to another request's salt gave one key."""
    first, second = (with_value(name, value) for name in pair)
    if first == second or BASE in (first, second):
        return
    assert first.root() != second.root()
    assert first.root() == with_value(pair[0], value).root()


def test_every_field_of_the_identity_is_in_the_key() -> None:
    """K191 vllm#44250 (F17): the external key lacked the adapter."""
    roots = {with_value(name, "other").root() for name in NAMES}
    assert len(roots | {BASE.root()}) == len(NAMES) + 1


def test_five_contexts_have_five_entries_and_find_their_own() -> None:
    """K193 kvcache-ai/ktransformers#2184 (F17): the salt was computed, carried, and never used."""
    bench = Bench(MLA, device_pages=20)
    prompt = tokens_of(1, 4 * PAGE)
    roots = [evolve(BASE, tenant_salt=bytes([n])).root() for n in range(5)]
    tables = list[list[int]]()
    for root in roots:
        held = bench.start(prompt, root=root)
        assert held.lease.sealed == 0, "another context's pages were hit"
        bench.compute(held, prompt)
        tables.append(list(held.lease.pages))
        bench.close(held)
    assert len({page for table in tables for page in table}) == 20
    for root, table in zip(roots, tables, strict=True):
        again = bench.start(prompt, root=root)
        assert list(again.lease.pages) == table
        bench.close(again)


async def test_an_engines_salt_reaches_its_index() -> None:
    """K193 kvcache-ai/ktransformers#2184 (F17): the field was lost between two objects."""
    roots = list[bytes]()
    for salt in (b"", b"one", b"two", b"one"):
        async with open_engine(toy_model(), toy_config(tenant_salt=salt)) as engine:
            await answer(engine, prompt_of(1, 40), PARAMS)
            roots.append(engine._core.root)
            assert list(engine._core.pool.index.tree.roots) == [roots[-1]]
    assert len(set(roots)) == 3
    assert roots[1] == roots[3]


async def test_after_new_weights_no_tier_serves_the_old_ones() -> None:
    """K199 sglang#26792 (F17): a flush cleared device and host; what was stored came back later.

    A store is in the air when the weights change; it ends afterwards. Nothing old is hit.
    """
    hold = Hold(lambda order: order.kind == "store")
    ports = EnginePorts(copier=FaultyCopier(hold))
    async with open_engine(toy_model(), toy_config(device_pages=24), ports=ports) as engine:
        await answer(engine, PROMPT, PARAMS)
        assert await trio.to_thread.run_sync(hold.reached.wait, 10)
        with trio.fail_after(5):
            await engine.flush()
        hold.go.set()
        await trio.sleep(0.05)
        result = await answer(engine, PROMPT, PARAMS)
        assert result.usage.hit_device == result.usage.hit_host == 0
        assert same(result, await COLD.answer(PROMPT, PARAMS))
        assert (await answer(engine, PROMPT, PARAMS)).usage.hit_device > 0
        assert_whole(await at_rest(engine))


async def test_each_flush_begins_a_name_that_was_never_used() -> None:
    """K201 lightseekorg/tokenspeed#1125 (F17): an update without a version kept the old name."""
    async with open_engine(toy_model(), toy_config()) as engine:
        roots = [engine._core.root]
        for _ in range(3):
            await engine.flush()
            roots.append(engine._core.root)
    assert len(set(roots)) == 4


def test_keys_are_equal_in_every_process() -> None:
    """K205 LMCache#1139 (F17): the root of the chain was random in each process."""
    program = (
        "from kvlease.protocols.identity import CacheIdentity, page_hash\n"
        "root = CacheIdentity('weights', 'schema', adapter='a', tenant_salt=b's').root()\n"
        "print(root.hex(), page_hash(root, bytes(64)).hex())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    root = CacheIdentity("weights", "schema", adapter="a", tenant_salt=b"s").root()
    assert said == {f"{root.hex()} {page_hash(root, bytes(64)).hex()}"}
