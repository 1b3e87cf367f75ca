"""The simulated device: deterministic, without threads, with loads that overlap with compute."""

import threading
from functools import cache

import msgspec
import pytest
import trio

from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import (
    StepDone,
    TransferDone,
    TransferLanded,
    TransferLayerDone,
    TransferPlan,
)
from kvlease.runtime.engine import Engine, open_engine
from kvlease.services.lab.spec import DeviceSpec, LinkSpec
from tests.lab.rig import PARAMS, PROMPT, Lab, make_host_only, serve
from tests.runtime.toy import PAGE, answer, prompt_of, same, toy_config, toy_model

SLOW = LinkSpec(latency_s=0.5, bytes_per_s=1e9)


@cache
def many_sessions(_run: int = 0) -> Lab:
    """Serve 24 sessions of three turns from a device that holds a fraction of them."""
    lab = Lab(config=toy_config(device_pages=40, host_pages=400))
    params = SamplingParams(max_tokens=6, ignore_eos=True)

    async def body(engine: Engine) -> None:
        prompts = [prompt_of(seed, 40 + seed % 30, shared=20) for seed in range(24)]
        for _ in range(3):
            lab.results += await serve(engine, prompts, params, at_once=12)
            done = lab.results[-len(prompts) :]
            prompts = [
                [*p, *r.tokens, *prompt_of(7, 20)] for p, r in zip(prompts, done, strict=True)
            ]

    lab.run(body)
    return lab


def test_two_runs_write_the_same_log_and_start_no_thread() -> None:
    """Many sessions with restores: equal byte for byte, answers included."""
    before = threading.active_count()
    first, second = many_sessions(), many_sessions(1)
    assert threading.active_count() <= before  # idle threads of earlier runs may end meanwhile
    assert first.statistics is not None
    assert first.statistics.ledger_ok, first.statistics.ledger_error
    assert first.statistics.counters.loads > 5
    assert first.statistics.counters.gate_waits > 5
    assert first.lines() == second.lines()
    assert first.file.getvalue().count(b"\n") > 500
    assert first.results == second.results
    assert first.seconds == second.seconds


def test_answers_are_those_of_a_real_device() -> None:
    """The simulation changes when things happen, never what is computed."""
    lab = many_sessions()
    results: list[object] = []

    async def real() -> None:
        async with open_engine(toy_model(), toy_config()) as engine:
            prompts = [prompt_of(seed, 40 + seed % 30, shared=20) for seed in range(24)]
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            for got, prompt in zip(lab.results, prompts, strict=False):
                assert same(got, await answer(engine, prompt, params))
                results.append(got)

    trio.run(real)
    assert len(results) == 24


def seconds_to_restore(spec: DeviceSpec) -> tuple[float, Lab]:
    """Time one token behind a restored prefix; its tail is on the device, its pages are not."""
    lab = Lab(spec, toy_config(device_pages=24))
    took: list[float] = []

    async def body(engine: Engine) -> None:
        await make_host_only(engine, PROMPT)
        began = trio.current_time()
        result = await answer(engine, PROMPT, SamplingParams(max_tokens=1))
        took.append(trio.current_time() - began)
        assert result.usage.hit_host > 0

    lab.run(body)
    return took[0], lab


def test_a_layer_waits_for_its_own_load_and_no_other() -> None:
    """Layer 0 keeps no pages and waits for none; 1 and 2 load while the layer before computes.

    Loads are over after 0.5 and 1.0 s, kernels take 0.3 s: 0 to 0.3, 0.5 to 0.8, 1.0 to 1.3.
    """
    took, lab = seconds_to_restore(DeviceSpec(load=SLOW, step_s=0.9, token_s=0.0))
    assert took == pytest.approx(1.3, abs=1e-3)
    assert lab.statistics is not None
    assert lab.statistics.counters.gate_wait_s == pytest.approx(0.2 + 0.2, abs=1e-3)


def test_loads_behind_slow_kernels_cost_nothing() -> None:
    """A step costs what the spec says, and loads that end before their layer's turn are free."""
    took, lab = seconds_to_restore(DeviceSpec(load=SLOW, step_s=3.0, token_s=0.0))
    assert took == pytest.approx(3.0, abs=1e-3)
    assert lab.statistics is not None
    assert lab.statistics.counters.gate_wait_s == 0


def test_bytes_land_before_anybody_says_so() -> None:
    """Every component of a load lands before its layer is done; a store's before the whole."""
    lab = Lab(config=toy_config(device_pages=24))

    async def body(engine: Engine) -> None:
        await make_host_only(engine, PROMPT)
        await answer(engine, PROMPT, PARAMS)

    lab.run(body)
    planned: dict[int, TransferPlan] = {}
    landed: dict[int, int] = {}
    layers: dict[tuple[int, int], int] = {}
    for event in lab.events:
        match event:
            case TransferPlan():
                planned[event.transfer] = event
            case TransferLanded():
                landed[event.transfer] = landed.get(event.transfer, 0) + event.nbytes
                key = event.transfer, event.layer
                layers[key] = layers.get(key, 0) + event.nbytes
            case TransferLayerDone():
                assert layers[event.transfer, event.layers[0]] == event.nbytes
            case TransferDone():
                assert landed[event.transfer] == planned[event.transfer].nbytes == event.nbytes
            case _:
                pass
    assert {plan.direction for plan in planned.values()} == {"load", "store"}
    assert lab.device is not None
    assert lab.device.truth.num_landed > 10
    assert not lab.device.truth.early


def test_links_can_be_one() -> None:
    """Loads and stores on one link take turns, so the same work takes longer."""

    def seconds(*, shares_link: bool) -> float:
        slow = LinkSpec(latency_s=0.1, bytes_per_s=1e9)
        spec = DeviceSpec(load=slow, store=slow, shares_link=shares_link)
        lab = Lab(spec, toy_config(device_pages=24, load_timeout_s=60.0))

        async def body(engine: Engine) -> None:
            await make_host_only(engine, PROMPT)
            prompts = [PROMPT, *(prompt_of(seed, 5 * PAGE) for seed in range(8))]
            await serve(engine, prompts, PARAMS, at_once=3)

        lab.run(body)
        assert any(isinstance(event, StepDone) for event in lab.events)
        return lab.seconds

    assert seconds(shares_link=True) > seconds(shares_link=False)


def test_the_spec_goes_through_a_file() -> None:
    spec = DeviceSpec(load=SLOW, shares_link=True, token_s=1e-6)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=DeviceSpec) == spec
    assert spec.load.seconds(1_000_000_000) == 1.5
    assert spec.step_seconds(0) == spec.step_s


def test_pages_are_held_until_their_late_copy_has_returned() -> None:
    """A copy in flight at its deadline still writes: its pages wait in quarantine for it (R6)."""
    spec = DeviceSpec(load=LinkSpec(latency_s=2.0, bytes_per_s=1e9))
    lab = Lab(spec, toy_config(device_pages=24, load_timeout_s=0.5))
    seen: list[int] = []

    async def body(engine: Engine) -> None:
        await make_host_only(engine, PROMPT)
        result = await answer(engine, PROMPT, PARAMS)
        seen.append(engine.statistics().device.quarantined)
        assert result.usage.hit_host == 0
        assert result.usage.recomputed > 0
        await trio.sleep(3)
        seen.append(engine.statistics().device.quarantined)

    lab.run(body)
    assert seen[0] > 0
    assert seen[1] == 0
    assert lab.statistics is not None
    assert lab.statistics.counters.transfer_timeouts == lab.statistics.counters.failed_transfers > 0
    assert lab.statistics.ledger_ok
