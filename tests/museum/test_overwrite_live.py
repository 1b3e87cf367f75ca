"""C03: memory that was given away, or written, while somebody still read or wrote it."""

import random
from contextlib import suppress

import pytest
import torch
import trio
from attrs import define

from kvlease.errors import DeadlineExceeded
from kvlease.pools.copies import index_tensor, span_orders
from kvlease.pools.storage import SpanStore, span_components
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.ports import StepInput
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.completions import CpuCompletion
from kvlease.runtime.engine import open_engine
from kvlease.runtime.loader import submit
from kvlease.runtime.request import GenerateResult
from kvlease.units import TransferId
from tests.museum.held_steps import HeldSteps, JumpingClock, all_stored, until
from tests.museum.rig import MLA, PAGE, ROOT, Bench, is_same, tokens_of
from tests.runtime.loader_rig import Rig, running
from tests.runtime.rig import PATIENCE_S
from tests.runtime.test_engine import assert_whole, at_rest
from tests.runtime.toy import COLD, answer, prompt_of, same, toy_config

PARAMS = SamplingParams(max_tokens=4)
PROMPT = tokens_of(1, 6 * PAGE)


@define(eq=False)
class Step:
    """A launched step that may still read pages."""

    id: int = 7
    kind: str = "step"
    is_settled: bool = False


@pytest.mark.parametrize("first", ["step", "copies"])
def test_a_page_under_a_launched_step_takes_no_load(first: str) -> None:
    """K019 vllm#47282 (F04): a load wrote restored bytes into pages that a forward still read.

    A's load fails with a step of A's launched; A leaves; B's load wants all pages of the pool.
    """
    bench = Bench(MLA, device_pages=6, host_pages=32)
    other = tokens_of(2, 6 * PAGE)
    bench.cache_on_host(other)
    bench.cache_on_host(PROMPT)
    reader, step = bench.start(PROMPT), Step()
    assert reader.load is not None
    bench.pool.lost(reader.load, "late", [step])
    bench.close(reader)
    assert bench.begin(other) is None
    if first == "step":
        step.is_settled = True
    else:
        bench.pool.transfers.settled(reader.load)
    assert bench.begin(other) is None, "one of the two that may touch the pages is not over"
    step.is_settled = True
    if first == "step":
        bench.pool.transfers.settled(reader.load)
    held = bench.start(other)
    bench.bring(held.load)
    assert not [*bench.wrong(held, other, 6)]
    bench.check()


def test_a_page_in_the_table_of_a_sequence_takes_no_load() -> None:
    """K019 vllm#47282 (F04): a lease is a right to read, whether or not a step uses it just then.

    The load fails and all its copies have returned before the scheduler hears of it, which then
    starts its readers over one by one. Found by the scenarios ``pressure`` and ``keeping``.
    """
    bench = Bench(MLA, device_pages=6, host_pages=32)
    other = tokens_of(2, 6 * PAGE)
    bench.cache_on_host(other)
    bench.cache_on_host(PROMPT)
    readers = [bench.start(PROMPT), bench.start(PROMPT)]
    load = readers[0].load
    assert load is not None
    bench.pool.transfers.settled(load)
    bench.pool.lost(load, "late", ())
    for reader in readers:
        assert bench.begin(other) is None, "a lease on the pages has not ended"
        bench.close(reader)
    held = bench.start(other)
    bench.bring(held.load)
    assert not [*bench.wrong(held, other, 6)]
    bench.check()


def test_a_page_under_a_reader_beside_the_scheduler_takes_no_load() -> None:
    """K019 vllm#47282 (F04): whoever has opened layers that came may read them until it is done.

    The load fails after some layers; a lease beside the scheduler is open on its pages.
    """
    bench = Bench(MLA, device_pages=6, host_pages=32)
    other = tokens_of(2, 6 * PAGE)
    bench.cache_on_host(other)
    bench.cache_on_host(PROMPT)
    held = bench.start(PROMPT)
    assert held.load is not None
    bench.carry(held.load)
    last_use = CpuCompletion("the reader's last use")
    last_use.set_recorded()
    lease = bench.pool.lease_prefix(ROOT, PROMPT)
    bench.lose(held.load, "late")
    bench.close(held)
    assert bench.begin(other) is None
    lease.close(last_use)
    bench.pool.reclaim()
    assert bench.begin(other) is None, "what the reader has launched still runs"
    last_use.finish()
    bench.pool.reclaim()
    again = bench.start(other)
    bench.bring(again.load)
    assert not [*bench.wrong(again, other, 6)]


@pytest.mark.parametrize("end", ["cancelled", "deadline"])
@pytest.mark.parametrize("is_restored", [False, True])
async def test_pages_of_a_request_that_ends_in_a_step_wait_for_the_step(
    end: str, *, is_restored: bool
) -> None:
    """K025 vllm-ascend#14055, K023 sglang#36738 (F04): all pages came free with a step in flight.

    A's step is held on the device and A ends. B needs A's pages, for its own prefill or for a
    prefix to be loaded: it gets none before the step is over.
    """

    def is_of_a(inputs: StepInput) -> bool:
        return any(list(part.tokens) == leaver[:64] for part in inputs.sequences)

    leaver, wanted = prompt_of(9, 70), prompt_of(2, 90)
    model, leaving = HeldSteps(is_of_a), trio.CancelScope()
    clock = JumpingClock()
    config = toy_config(device_pages=9, chunk_tokens=64, tail_every=4, request_timeout_s=60.0)
    results: list[GenerateResult] = []
    async with open_engine(model, config, ports=EnginePorts(clock=clock)) as engine:
        if is_restored:
            for seed in (2, 3, 4):
                await answer(engine, prompt_of(seed, 90), PARAMS)
            await all_stored(engine)
        book = engine._core.pool.memory.device

        async def run_a() -> None:
            with leaving, suppress(DeadlineExceeded):
                await answer(engine, leaver, PARAMS)

        async def run_b() -> None:
            results.append(await answer(engine, wanted, PARAMS))

        try:
            with trio.fail_after(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run_a)
                    await model.wait_reached()
                    (seq,) = engine._core.running
                    pages = list(seq.require_held().owned)
                    epochs = [book.epochs[page] for page in pages]
                    assert len(pages) == 4
                    if end == "deadline":
                        clock.ahead_s += 61.0
                    else:
                        leaving.cancel()
                    nursery.start_soon(run_b)
                    await until(lambda: seq.ending is not None)
                    await until(lambda: engine.statistics().waiting == 1)
                    await trio.sleep(0.03)
                    assert [book.epochs[page] for page in pages] == epochs, "released in its step"
                    assert engine.statistics().waiting == 1
                    model.go.set()
        finally:
            model.go.set()
        assert same(results[0], await COLD.answer(wanted, PARAMS))
        assert (results[0].usage.hit_host > 0) == is_restored
        assert_whole(await at_rest(engine))


def _moves(rng: random.Random) -> tuple[list[int], list[int]]:
    """Draw moves within one store: chains, cycles and copies, each target once."""
    targets = rng.sample(range(8), rng.randint(2, 8))
    return [rng.randrange(8) for _ in targets], targets


@pytest.mark.parametrize("seed", range(100))
def test_moves_within_one_store_are_simultaneous(seed: int) -> None:
    """K027 vllm#50729 (F11): a state was shifted within one block, and the ranges overlapped.

    Chains (1 to 2, 2 to 3), cycles (4 to 5, 5 to 4) and any others equal moves from a snapshot.
    """
    rng = random.Random(seed)
    source, target = _moves(rng) if seed else ([1, 2, 4, 5], [2, 3, 5, 4])
    store = SpanStore(MLA, 8)
    for layer, span in span_components(MLA):
        rows = store.rows(layer, span.name)
        rows.copy_(torch.arange(rows.numel(), dtype=rows.dtype).view(rows.shape))
    before = {key: store.rows(*key).clone() for key in store.memory}
    ends = (index_tensor(source), index_tensor(target))
    for order in span_orders(TransferId(1), "load", (store, store), ends):
        assert order.run() == order.nbytes
    for key, old in before.items():
        wanted = old.clone()
        wanted[target] = old[source]
        assert is_same(store.rows(*key), wanted)


async def test_a_load_that_was_given_a_fence_waits_for_it() -> None:
    """K031 local-inference-lab/rtx6kpro#47 (F02): the call took a fence, and ignored it.

    Not one byte of the destination changes before the fence has fired.
    """
    bench = Bench(MLA)
    bench.cache_on_host(PROMPT)
    held = bench.start(PROMPT)
    assert held.load is not None
    fence, rig = CpuCompletion("the last reader"), Rig()
    fence.set_recorded()
    before = bench.snapshot()
    with trio.fail_after(PATIENCE_S):
        async with running(rig):
            transfer = rig.transfer(*held.load.copies, after=(fence,))
            submit(rig.mailbox, transfer)
            await trio.sleep(0.03)
            now = bench.snapshot()
            assert all(is_same(now[place], rows) for place, rows in before.items())
            assert not transfer.state.is_final
            fence.finish()
            await transfer.wait_done()
    assert not [*bench.wrong(held, PROMPT, 6)]


@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_a_kept_state_is_a_snapshot(boundary: int) -> None:
    """K033 FlashML-org/FreeToken#287 (F04): a live slot was given to the tree and written later.

    A keeps its state at a boundary and goes on, in the same ring. B resumes from the boundary.
    """
    bench = Bench()
    prompt = tokens_of(1, 5 * PAGE)
    a = bench.start(prompt)
    for page in range(1, 6):
        bench.compute(a, prompt[: 4 * page * PAGE], tails=page == boundary)
    b = bench.start(prompt[: 4 * (boundary + 1) * PAGE])
    assert b.lease.sealed == boundary
    assert b.lease.slot != a.lease.slot
    bench.bring(b.load)
    assert not [*bench.wrong(b, prompt, boundary)]
    assert not [*bench.wrong(a, prompt, 5)]
