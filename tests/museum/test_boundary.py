"""C15: what is kept and what is looked for differ by one, at the edge of a window or a page."""

import attrs
import pytest
from attrs import evolve

from kvlease.kernels.models.config import V4Config
from kvlease.pools.storage import tail_components
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.geometries import deepseek_v4_schema
from kvlease.runtime.engine import Engine, open_engine
from tests.museum.held_steps import all_stored
from tests.museum.rig import PAGE as BENCH_PAGE
from tests.museum.rig import V4, Bench, tokens_of, v4_schema
from tests.runtime.test_engine import assert_whole, at_rest
from tests.runtime.toy import COLD, PAGE, TOY, Cold, answer, prompt_of, same, toy_config, toy_model

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)
SMALL = evolve(TOY, layer_kinds=("sparse", "sliding"), mlp_kinds=("hash", "score"), window=8)
WINDOWS: dict[int, V4Config] = {window: evolve(SMALL, window=window) for window in (4, 8, 24, 40)}
COLD_AT = {window: Cold(config) for window, config in WINDOWS.items()}


async def push_off(engine: Engine) -> None:
    """Wait for the stores, then leave on the host alone whatever is there too."""
    await all_stored(engine)
    pool = engine._core.pool
    pool.memory.take_back(pool.index.evict_tails(999, "device"))
    pool.memory.take_back(pool.index.evict_device(999, can_drop=False))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("tail_every", [1, 3, 50])
async def test_what_is_stored_is_found_again(window: int, tail_every: int) -> None:
    """K221 vllm#53951 (F19): 1.2 TB were written, and not one byte was ever restored.

    The writer kept n window blocks, the reader asked for n + 1. For each window and policy: store
    a prefix, evict it, look it up: it is found up to its last boundary, and the answer is right.
    """
    model, cold = toy_model(WINDOWS[window]), COLD_AT[window]
    async with open_engine(model, toy_config(tail_every=tail_every)) as engine:
        for length in (PAGE + 1, 3 * PAGE, 5 * PAGE + 7):
            prompt = prompt_of(window + length, length)
            await answer(engine, prompt, PARAMS)
            await push_off(engine)
            again = await answer(engine, prompt, PARAMS)
            assert again.usage.hit_host == (length - 1) // PAGE * PAGE
            assert same(again, await cold.answer(prompt, PARAMS))
        assert engine.statistics().counters.restored_bytes > 0
        assert_whole(await at_rest(engine))


@pytest.mark.parametrize("tail_every", [1, 4])
@pytest.mark.parametrize("pages", [1, 2, 5, 8])
async def test_one_token_less_costs_one_page_at_most(pages: int, tail_every: int) -> None:
    """K225 vllm-ascend#9247 (F19): one block dropped, then rounded down: half of the hit was gone.

    A prompt of whole pages is asked again; its last token must be computed, and no more is lost
    than that token's page.
    """
    prompt = prompt_of(pages, pages * PAGE)
    async with open_engine(toy_model(), toy_config(tail_every=tail_every)) as engine:
        await answer(engine, prompt, PARAMS)
        again = await answer(engine, prompt, PARAMS)
        assert again.usage.hit_device == (pages - 1) * PAGE
        longer = await answer(engine, [*prompt, 1, 2, 3], PARAMS)
        assert longer.usage.hit_device >= (pages - 1) * PAGE


@pytest.mark.parametrize("ratios", [(4, 16), (2, 8), (8, 16), (16, 16)])
def test_state_inside_a_group_is_kept_only_where_a_boundary_needs_it(
    ratios: tuple[int, int],
) -> None:
    """K229 sglang#27294 (F19): a half-full compressor was moved with each node, and never needed.

    Boundaries are group boundaries: of an overlapping compressor the last group's overlap is kept,
    of a plain one nothing; what is kept is enough at every boundary.
    """
    geometry = attrs.evolve(V4, sparse_ratio=ratios[0], heavy_ratio=ratios[1])
    bench = Bench(deepseek_v4_schema(geometry, BENCH_PAGE, "float32"))
    kept = {
        (type(bench.schema.layers[layer]).__name__, tail.name.removesuffix("_kv")): tail.kept_rows
        for layer, tail in tail_components(bench.schema)
        if not tail.name.endswith("_gate")
    }
    assert kept["HeavyLayer", "compressor"] == 0
    assert kept["SparseLayer", "compressor"] == ratios[0]
    assert {rows for (_, name), rows in kept.items() if name == "window"} == {7}
    prompt = tokens_of(1, 5 * BENCH_PAGE)
    bench.cache_on_host(prompt)
    for boundary in range(1, 6):
        held = bench.start(prompt, boundary)
        assert held.load is not None
        moved = {(order.layer, order.component) for order in held.load.copies}
        assert (2, "compressor_kv") not in moved
        bench.bring(held.load)
        assert not [*bench.wrong(held, prompt, boundary)]
        bench.close(held)


@pytest.mark.parametrize("chunk", [1, 3])
async def test_a_group_is_closed_by_the_true_length(chunk: int) -> None:
    """K231 GDzhu01/vllm-ascend-deepseekv4#76 (F19): wrong from exactly 4 tokens on.

    Prompts of 1 to 9 tokens, and around 16: fed in small chunks, each group of 4 and of 16 closes
    with its own tokens, so that the answer is that of the prompt in one piece.
    """
    config = toy_config(chunk_tokens=chunk, prefix_cache=False)
    async with open_engine(toy_model(), config) as engine:
        for length in (*range(1, 10), 15, 16, 17, 32):
            prompt = prompt_of(length, length)
            assert same(await answer(engine, prompt, PARAMS), await COLD.answer(prompt, PARAMS))


@pytest.mark.parametrize("output", [1, PAGE, 2 * PAGE + 1])
async def test_the_pages_at_the_end_are_those_that_are_stored(output: int) -> None:
    """K233 vllm#30358 (F19): the list made at allocation was shorter than the one at the end.

    An answer goes on past its prompt's pages: every page that was filled is on the host afterwards.
    """
    prompt = prompt_of(3, 2 * PAGE - 3)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    async with open_engine(toy_model(), toy_config()) as engine:
        result = await answer(engine, prompt, params)
        await all_stored(engine)
        computed = len(prompt) + output - 1
        assert engine.statistics().host.sealed == computed // PAGE
        turn = [*prompt, *result.tokens, 5, 6]
        await push_off(engine)
        again = await answer(engine, turn, PARAMS)
        assert again.usage.hit_host == computed // PAGE * PAGE
        assert same(again, await COLD.answer(turn, PARAMS))


@pytest.mark.parametrize("window", [8, 24])
async def test_every_length_to_four_windows(window: int) -> None:
    """K221 vllm#53951 (F19): every length is found up to its last boundary, and equals a cold run.

    One prompt is asked for at every length from 1 up: partial windows, partial groups, full ones.
    """
    cold = COLD_AT[window]
    lengths = range(1, 4 * window + 2, 1 if window == 8 else 5)
    config = toy_config(tail_every=1, device_pages=40)
    async with open_engine(toy_model(WINDOWS[window]), config) as engine:
        for length in lengths:
            prompt = prompt_of(0, length)
            result = await answer(engine, prompt, PARAMS)
            assert same(result, await cold.answer(prompt, PARAMS)), length
            if length > PAGE + 1:
                assert result.usage.hit_device > 0
    assert v4_schema(window).needs_tail
