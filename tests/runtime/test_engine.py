"""The engine's promises beside exactness: every request ends, and every page comes back."""

import random
import threading

import pytest
import trio

from kvlease.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFull,
    ModelLoadError,
    PromptError,
    RequestFailed,
)
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.counters import Statistics
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.steps import StepWorker
from tests.runtime.toy import (
    COLD,
    PAGE,
    TOY,
    FaultyCopier,
    Hold,
    answer,
    prompt_of,
    same,
    toy_config,
    toy_model,
)

PARAMS = SamplingParams(max_tokens=4)


async def at_rest(engine: Engine) -> Statistics:
    """Return the statistics once nothing is under way; fails if pages stay away."""
    with trio.fail_after(10):
        while True:
            now = engine.statistics()
            busy = now.running + now.waiting + now.device.quarantined + now.slots.quarantined
            if not busy:
                return now
            await trio.sleep(0.01)


def assert_whole(statistics: Statistics) -> None:
    """Nothing leaked: no slot, no promise, no exclusive page is left (R11)."""
    assert statistics.ledger_ok, statistics.ledger_error
    assert statistics.device.held == statistics.device.reserved == 0
    assert statistics.slots.free == statistics.slots.total
    assert statistics.device_tails.held == 0


@pytest.mark.parametrize("seed", range(12))
async def test_cancel_anywhere_gives_everything_back(seed: int) -> None:
    """Abort in flight (C05): leaving the block at any moment returns pages, slots and tails."""
    rng = random.Random(seed)
    config = toy_config(device_pages=40, max_sessions=4)
    async with open_engine(toy_model(), config) as engine:

        async def impatient(number: int) -> None:
            prompt = prompt_of(number % 5, rng.randrange(1, 250), 64)
            with trio.move_on_after(rng.random() * 0.15):
                async with engine.generate(prompt, SamplingParams(max_tokens=30)) as stream:
                    taken = 0
                    async for _ in stream:
                        taken += 1
                        if taken > number % 7:
                            break

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(16):
                    nursery.start_soon(impatient, number)
        assert_whole(await at_rest(engine))
        prompt = prompt_of(1, 100, 64)
        assert same(await answer(engine, prompt, PARAMS), await COLD.answer(prompt, PARAMS))


async def test_cancel_while_its_load_is_held_frees_nothing_too_early() -> None:
    """R6: rings and pages that a running copy still writes stay in quarantine until it returns."""
    hold = Hold(lambda o: (o.kind, o.component) == ("load", "window") and o.layer == 1)
    prompt = prompt_of(1, 6 * PAGE + 5)
    config = toy_config(device_pages=24)
    ports = EnginePorts(copier=FaultyCopier(hold))
    async with open_engine(toy_model(), config, ports=ports) as engine:
        await answer(engine, prompt, PARAMS)
        for seed in range(100, 104):
            await answer(engine, prompt_of(seed, 6 * PAGE), PARAMS)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:

                async def run() -> None:
                    async with engine.generate(prompt, PARAMS) as stream:
                        await stream.drain()

                nursery.start_soon(run)
                assert await trio.to_thread.run_sync(hold.reached.wait, 10)
                nursery.cancel_scope.cancel()
                threading.Timer(0.3, hold.go.set).start()
        assert_whole(await at_rest(engine))


async def test_preempted_requests_are_restored_and_equal() -> None:
    """Preemption (K025, K061): pages run out while decoding; all still get the cold answer."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = [prompt_of(seed, 70) for seed in range(6)]
    config = toy_config(device_pages=20, host_pages=60)
    async with open_engine(toy_model(), config) as engine:
        results = {}

        async def run(number: int) -> None:
            results[number] = await answer(engine, prompts[number], params)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(run, number)
        for number, prompt in enumerate(prompts):
            assert same(results[number], await COLD.answer(prompt, params))
        done = await at_rest(engine)
        assert done.counters.preempted > 0
        assert_whole(done)


@pytest.mark.parametrize("policy", ["through", "selective", "back"])
async def test_write_policies_store_when_they_say(policy: str) -> None:
    """Write-through stores what is sealed, selective what is asked for twice, back what must go."""
    prompt = prompt_of(1, 5 * PAGE + 1)
    config = toy_config(device_pages=24, write_policy=policy)
    async with open_engine(toy_model(), config) as engine:
        await answer(engine, prompt, PARAMS)
        await trio.sleep(0.05)
        first = engine.statistics().host.sealed
        assert (first > 0) == (policy == "through")
        await answer(engine, prompt, PARAMS)
        await trio.sleep(0.05)
        second = engine.statistics().host.sealed
        assert (second > 0) == (policy != "back")
        for seed in range(100, 106):
            await answer(engine, prompt_of(seed, 6 * PAGE), PARAMS)
        again = await answer(engine, prompt, PARAMS)
        assert again.usage.hit_host + again.usage.hit_device > 0
        assert same(again, await COLD.answer(prompt, PARAMS))
        assert_whole(await at_rest(engine))


async def test_fork_continues_on_a_branch() -> None:
    """A fork shares the sealed pages of a running answer and goes its own way."""
    prompt = prompt_of(2, 3 * PAGE + 2)
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    async with open_engine(toy_model(), toy_config()) as engine:
        async with engine.generate(prompt, long) as parent:
            so_far: list[int] = []
            async for event in parent:
                so_far.append(event.token)
                if len(so_far) == 10:
                    break
            async with engine.fork(parent, PARAMS) as branch:
                result = await branch.drain()
        usage = result.usage
        assert usage.hit_device >= 3 * PAGE
        published = [event.token for event in parent.request.output]
        branched = prompt + published[: usage.prompt - len(prompt)]
        assert result.tokens == (await COLD.answer(branched, PARAMS)).tokens
        assert_whole(await at_rest(engine))


async def test_flush_forgets_everything_cached() -> None:
    """After the weights changed nothing old may be hit (F17), and running answers go on."""
    prompt = prompt_of(1, 100)
    async with open_engine(toy_model(), toy_config()) as engine:
        await answer(engine, prompt, PARAMS)
        assert (await answer(engine, prompt, PARAMS)).usage.hit_device > 0
        await engine.flush()
        assert (await answer(engine, prompt, PARAMS)).usage.hit_device == 0
        assert_whole(await at_rest(engine))


async def test_a_full_queue_refuses_with_advice() -> None:
    """Overload is refused at once, with seconds after which to try again."""
    config = toy_config(max_queue=2, max_sessions=1)
    async with open_engine(toy_model(), config) as engine:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:

                async def run() -> None:
                    await answer(engine, prompt_of(1, 200), SamplingParams(max_tokens=20))

                for _ in range(3):
                    nursery.start_soon(run)
                    await trio.sleep(0.02)
                await trio.sleep(0.02)
                with pytest.raises(EngineFull) as refused:
                    await answer(engine, [1, 2, 3], PARAMS)
                assert refused.value.retry_after_s > 0
                nursery.cancel_scope.cancel()
        assert engine.statistics().counters.rejected == 1


async def test_a_request_past_its_deadline_ends() -> None:
    """R9: no session waits for ever; the error names the owner's deadline."""
    config = toy_config(request_timeout_s=0.2)
    async with open_engine(toy_model(), config) as engine:
        with trio.fail_after(10), pytest.raises(DeadlineExceeded, match="request_timeout_s"):
            await answer(engine, prompt_of(1, 30), SamplingParams(max_tokens=900, ignore_eos=True))
        assert_whole(await at_rest(engine))


async def test_a_dead_step_worker_is_restarted_and_its_step_done_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An actor that dies (F18) costs time, never an answer."""
    forward = StepWorker._forward
    deaths = [2]

    async def dies(self: StepWorker, *args: object) -> object:
        if deaths[0]:
            deaths[0] -= 1
            raise ConnectionError("killed by the test")
        return await forward(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(StepWorker, "_forward", dies)
    prompt = prompt_of(1, 100)
    async with open_engine(toy_model(), toy_config()) as engine:
        with trio.fail_after(20):
            result = await answer(engine, prompt, PARAMS)
        assert same(result, await COLD.answer(prompt, PARAMS))
        done = await at_rest(engine)
        assert done.counters.actor_restarts == 2
        assert_whole(done)


async def test_an_engine_that_cannot_go_on_ends_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When restarts run out the caller gets one error, not a wait without end (R9)."""

    async def dies(self: StepWorker, *_: object) -> object:
        raise ConnectionError("killed by the test")

    monkeypatch.setattr(StepWorker, "_forward", dies)
    with trio.fail_after(20), pytest.raises(Exception, match=r"fail|died|restart|killed"):
        async with open_engine(toy_model(), toy_config()) as engine:
            await answer(engine, prompt_of(1, 100), PARAMS)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], PARAMS, "empty"),
        ([1, 64], PARAMS, "token 64 at position 1 is outside the vocabulary"),
        ([-1], PARAMS, "token -1 at position 0"),
        ([1 << 40], PARAMS, "int32"),
        (b"abc", PARAMS, "int32"),
        ([1] * 2000, SamplingParams(max_tokens=100), "2048 positions"),
        ([1] * 1000, PARAMS, "can never hold"),
    ],
)
async def test_impossible_prompts_are_refused_in_one_sentence(
    prompt: list[int] | bytes, params: SamplingParams, words: str
) -> None:
    """Bad input costs nothing and leaves nothing behind."""
    async with open_engine(toy_model(), toy_config(device_pages=20)) as engine:
        with pytest.raises(PromptError, match=words):
            async with engine.generate(prompt, params):
                pass
        assert engine.statistics().counters.requests == 0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"page_tokens": 24}, ConfigError, "multiple of 32"),
        ({"device_pages": 0}, ConfigError, "device_pages is 0"),
        ({"host_pages": -1}, ConfigError, "host_pages is -1"),
        ({"load_timeout_s": 0.0}, ConfigError, "load_timeout_s"),
        ({"device": "cuda"}, ConfigError, "cuda"),
    ],
)
async def test_impossible_configurations_are_refused(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    """Every refusal names the field."""
    with pytest.raises(error, match=words):
        async with open_engine(None, EngineConfig(**changes)):  # type: ignore[arg-type]
            pass


async def test_a_missing_model_folder_is_refused() -> None:
    """One sentence that names the path."""
    with pytest.raises(ModelLoadError, match="no-such-folder"):
        async with open_engine("no-such-folder"):
            pass


async def test_a_result_is_there_only_after_the_end() -> None:
    """Asking too early is a clear error, not a half answer."""
    async with (
        open_engine(toy_model(), toy_config()) as engine,
        engine.generate([1, 2, 3], PARAMS) as stream,
    ):
        with pytest.raises(RequestFailed, match="has not ended"):
            _ = stream.result
        assert (await stream.drain()).finish_reason in ("stop", "length")


async def test_sampling_is_reproducible_and_reports_logprobs() -> None:
    """The draw is keyed by seed and position, whatever the batch."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=7, logprobs=3)
    prompt = prompt_of(1, 40)
    async with open_engine(toy_model(), toy_config()) as engine:
        async with engine.generate(prompt, params) as stream:
            events = [event async for event in stream]
        results = []

        async def run() -> None:
            results.append(await answer(engine, prompt, params))

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(run)
        assert {r.tokens for r in results} == {tuple(event.token for event in events)}
        other = await answer(engine, prompt, SamplingParams(max_tokens=8, temperature=1.0, seed=8))
        assert other.tokens != results[0].tokens
    for event in events:
        assert event.logprob is not None
        assert event.logprob <= 0
        assert len(event.top_logprobs) == 3


async def test_stop_tokens_and_min_tokens() -> None:
    """A stop token ends an answer, but not before min_tokens."""
    prompt = prompt_of(1, 40)
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    async with open_engine(toy_model(), toy_config()) as engine:
        tokens = (await answer(engine, prompt, free)).tokens
        stop = frozenset({tokens[2]})
        first = tokens.index(tokens[2]) + 1
        early = await answer(engine, prompt, SamplingParams(max_tokens=12, stop_tokens=stop))
        assert early.tokens == tokens[:first]
        assert early.finish_reason == "stop"
        late = SamplingParams(max_tokens=12, stop_tokens=stop, min_tokens=6)
        assert len((await answer(engine, prompt, late)).tokens) >= 6


@pytest.mark.parametrize("fmt", ["fp8", "bf16"])
async def test_rounded_cache_formats_are_as_exact_as_the_plain_one(fmt: str) -> None:
    """Rows are rounded once, when stored: restored and cold answers read the same bytes."""
    config = EngineConfig(
        device_pages=16,
        host_pages=64,
        kv_format=fmt,  # type: ignore[arg-type]
        index_k_format=fmt,  # type: ignore[arg-type]
        digests=True,
        poison=True,
        load_or_recompute=False,
    )
    prompt = [i * 7 % 250 for i in range(300)]
    async with open_engine(None, config) as engine:
        first = await answer(engine, prompt, PARAMS)
        for seed in range(4):
            await answer(engine, [(i * 11 + seed) % 250 for i in range(300)], PARAMS)
        again = await answer(engine, prompt, PARAMS)
    assert again.usage.hit_host > 0
    assert same(first, again)


def _always_fails(order: CopyOrder) -> int | None:
    raise OSError(f"{order.kind} of {order.component} refused")


async def test_a_dead_host_tier_costs_time_only() -> None:
    """Every load and store fails (C07): answers are computed, nothing loops, nothing leaks."""
    ports = EnginePorts(copier=FaultyCopier(_always_fails))
    config = toy_config(device_pages=24)
    async with open_engine(toy_model(), config, ports=ports) as engine:
        for round_ in range(2):
            for seed in range(4):
                prompt = prompt_of(seed, 100, 40)
                with trio.fail_after(10):
                    result = await answer(engine, prompt, PARAMS)
                assert same(result, await COLD.answer(prompt, PARAMS)), (round_, seed)
        done = await at_rest(engine)
        assert done.counters.failed_transfers > 0
        assert_whole(done)


def test_the_toy_is_what_the_tests_say() -> None:
    """Windows longer than a page and top-k below the rows: the cases that break caches."""
    assert TOY.window > PAGE
    assert TOY.index_topk < 600 // TOY.sparse_ratio
