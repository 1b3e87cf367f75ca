"""Each kind of fault on the real engine: what is honest is survived, what is a lie corrupts."""

from functools import cache
from typing import Literal

import msgspec
import pytest
import trio
import trio.testing
from attrs import evolve

from kvlease.errors import UsageError
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.events import ActorRestart, TransferLanded
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.counters import Counters
from kvlease.runtime.engine import Engine, open_engine
from kvlease.runtime.request import GenerateResult
from kvlease.services.lab.damage import FaultyCopier
from kvlease.services.lab.faults import (
    CopyFault,
    CopyRule,
    Corrupt,
    Delay,
    DoneEarly,
    Drop,
    Fail,
    FaultPlan,
    FewerBytes,
    KillActor,
    NeverDone,
    RecordedLate,
    Reorder,
    Rule,
    Shorten,
    StallMailbox,
    Which,
    gate_plan,
)
from kvlease.services.lab.spec import DeviceSpec, LinkSpec
from tests.lab.rig import PARAMS, PROMPT, Lab, make_host_only, serve
from tests.runtime.toy import COLD, PAGE, answer, prompt_of, same, toy_config, toy_model

LOADS = Which(direction="load")
INDEX_K = Which(direction="load", components=("index_k",))
SMALL: EngineConfig = toy_config(device_pages=24, load_timeout_s=2.0)


@cache
def restored(*rules: Rule, config: EngineConfig = SMALL, spec: DeviceSpec | None = None) -> Lab:
    """Restore one prompt from the host on a device where these rules hold."""
    lab = Lab(spec or DeviceSpec(), config, FaultPlan(seed=3, rules=rules))

    async def body(engine: Engine) -> None:
        await make_host_only(engine, PROMPT)
        lab.results.append(await answer(engine, PROMPT, PARAMS))
        await trio.sleep(60)

    lab.run(body)
    return lab


def is_right(result: GenerateResult, prompt: list[int] = PROMPT) -> bool:
    cold: list[GenerateResult] = []

    async def learn() -> None:
        cold.append(await COLD.answer(prompt, PARAMS))

    trio.run(learn)
    return same(result, cold[0])


def landings(lab: Lab) -> list[tuple[int, int, str]]:
    landed = (event for event in lab.events if isinstance(event, TransferLanded))
    return [(event.transfer, event.layer, event.component) for event in landed]


def counters_of(lab: Lab) -> Counters:
    assert lab.statistics is not None
    assert lab.statistics.ledger_ok, lab.statistics.ledger_error
    return lab.statistics.counters


@pytest.mark.parametrize(
    ("fault", "is_late"),
    [
        (Delay(3.0), True),
        (Drop(), True),
        (NeverDone(), True),
        (Fail(), False),
        (Shorten(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_load_without_its_bytes_is_recomputed(fault: CopyFault, is_late: bool) -> None:
    """Slower, never wrong, never stuck (R9), and counted by what happened."""
    lab = restored(CopyRule(fault, INDEX_K))
    (result,) = lab.results
    assert is_right(result)
    counters = counters_of(lab)
    assert counters.failed_transfers > 0
    assert counters.transfer_timeouts == (counters.failed_transfers if is_late else 0)
    assert counters.restored_bytes == 0
    assert result.usage.hit_host == 0
    assert result.usage.recomputed > 0
    assert lab.statistics is not None
    quarantined = lab.statistics.device.quarantined
    assert quarantined > 0 if isinstance(fault, NeverDone) else quarantined == 0


@pytest.mark.parametrize("fault", [Delay(0.02), Reorder()], ids=lambda f: type(f).__name__)
def test_a_load_that_is_only_slow_or_in_another_order_is_used(fault: CopyFault) -> None:
    lab = restored(CopyRule(fault, LOADS))
    (result,) = lab.results
    assert is_right(result)
    assert result.usage.hit_host > 0
    assert counters_of(lab).failed_transfers == 0
    parts, before = landings(lab), landings(restored())
    assert sorted(parts) == sorted(before)
    assert (parts != before) is isinstance(fault, Reorder)


STALE: EngineConfig = evolve(SMALL, poison=False)
"""An early read gets what lay there before; poison would stop the kernels."""
SLOW = DeviceSpec(load=LinkSpec(latency_s=0.1, bytes_per_s=1e6))


@pytest.mark.parametrize(
    ("fault", "which"),
    [(DoneEarly(), INDEX_K), (DoneEarly(), LOADS), (RecordedLate(), LOADS)],
    ids=["kv-only", "off", "recorded late"],
)
def test_a_lie_about_time_is_read_early(fault: CopyFault, which: Which) -> None:
    """Nothing failed, nothing waited too long, and the answer is wrong: the incident."""
    lab = restored(CopyRule(fault, which), config=STALE, spec=SLOW)
    counters = counters_of(lab)
    assert counters.failed_transfers == counters.transfer_timeouts == 0
    assert lab.device is not None
    early = lab.device.truth.early
    assert early
    assert {read.component for read in early} >= {"index_k"}
    assert (which is not INDEX_K) or {read.component for read in early} == {"index_k"}
    assert not is_right(lab.results[0])


@pytest.mark.parametrize("fault", [FewerBytes(), Corrupt()], ids=lambda f: type(f).__name__)
def test_a_lie_about_bytes_corrupts(fault: CopyFault) -> None:
    """No completion can know of it: nothing was early and nothing failed."""
    lab = restored(CopyRule(fault, LOADS), config=STALE)
    assert counters_of(lab).failed_transfers == 0
    assert lab.device is not None
    assert not lab.device.truth.early
    assert not is_right(lab.results[0])
    landed = sum(e.nbytes for e in lab.events if isinstance(e, TransferLanded))
    honest = sum(e.nbytes for e in restored().events if isinstance(e, TransferLanded))
    assert (landed < honest) is isinstance(fault, FewerBytes)


def test_the_truth_is_that_nothing_is_early_with_the_gate() -> None:
    lab = restored(spec=SLOW)
    assert lab.device is not None
    assert not lab.device.truth.early
    assert lab.results[0].usage.hit_host > 0
    assert is_right(lab.results[0])


def test_a_store_that_fails_is_no_host_copy() -> None:
    """What did not arrive on the host is not found there (K093)."""
    lab = restored(CopyRule(Shorten(), Which(direction="store", components=("latent",))))
    counters = counters_of(lab)
    assert counters.stores == 0
    assert counters.failed_transfers > 0
    assert lab.results[0].usage.hit_host == 0
    assert is_right(lab.results[0])


@pytest.mark.parametrize("in_hand", [False, True], ids=["between", "in hand"])
@pytest.mark.parametrize("actor", ["loader", "prefill", "decode", "scheduler"])
def test_a_killed_actor_is_restarted_and_nobody_hangs(actor: str, in_hand: bool) -> None:
    """Requests that it served are served all the same, right, and every page comes back."""
    if actor == "scheduler" and in_hand:
        pytest.skip("a scheduler that dies in its work ends the engine: its books may be half done")
    plan = FaultPlan(rules=(KillActor(actor, message=4, in_hand=in_hand),))
    lab = Lab(config=evolve(SMALL, device_pages=40), faults=plan)
    prompts = [prompt_of(seed, 3 * PAGE + seed) for seed in range(6)]

    async def body(engine: Engine) -> None:
        for _ in range(2):
            lab.results += await serve(engine, prompts, PARAMS, at_once=3)
        await trio.sleep(60)

    lab.run(body)
    restarts = [e.actor for e in lab.events if isinstance(e, ActorRestart)]
    assert restarts == [actor]
    assert counters_of(lab).actor_restarts == 1
    assert len(lab.results) == 12
    for result, prompt in zip(lab.results, prompts * 2, strict=True):
        assert is_right(result, prompt)
    assert lab.statistics is not None
    assert lab.statistics.device.quarantined == lab.statistics.device.held == 0


@pytest.mark.parametrize("actor", ["loader", "prefill", "decode", "scheduler"])
def test_a_stalled_mailbox_only_costs_time(actor: str) -> None:
    """Its messages are read late: a stalled loader's transfers are late and recomputed."""
    seconds = 4.0
    lab = restored(*(StallMailbox(actor, seconds, message=n) for n in range(1, 40)))
    assert is_right(lab.results[0])
    counters = counters_of(lab)
    assert (counters.transfer_timeouts > 0) is (actor == "loader")
    assert lab.seconds > restored().seconds + seconds


def test_a_request_has_an_end_when_nothing_works() -> None:
    """Every load drops and prefill stalls past the deadline: the caller is told (R9)."""
    config = evolve(SMALL, request_timeout_s=5.0)
    rules: list[Rule] = [StallMailbox("prefill", 30.0, message=n) for n in range(1, 9)]
    rules.append(CopyRule(Drop()))
    lab = Lab(config=config, faults=FaultPlan(rules=tuple(rules)))
    ended: list[str] = []

    async def body(engine: Engine) -> None:
        began = trio.current_time()
        try:
            await answer(engine, PROMPT, PARAMS)
        except Exception as error:
            ended.append(str(error))
            assert trio.current_time() - began < 5.1

    lab.run(body)
    assert "within its 5 s" in ended[0]


def test_plans_go_through_json_and_draw_the_same() -> None:
    plan = FaultPlan(
        seed=9,
        rules=(
            CopyRule(Delay(0.1, spread=0.4), Which(direction="load", probability=0.5)),
            CopyRule(DoneEarly(), INDEX_K),
            KillActor("loader", 3),
            StallMailbox("decode", 0.2, 7),
        ),
    )
    again = msgspec.json.decode(msgspec.json.encode(plan), type=FaultPlan)
    assert again == plan
    first, second = restored(*plan.rules, spec=SLOW), restored(*again.rules, spec=SLOW)
    assert first.lines() == second.lines()
    unknown = b'{"rules":[{"type":"copies","fault":{"type":"late"}}]}'
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(unknown, type=FaultPlan)


def test_chance_takes_some_copies_and_spares_others() -> None:
    lab = restored(CopyRule(Delay(0.001, spread=0.01), Which(probability=0.5)))
    plain = restored()
    assert lab.seconds > plain.seconds
    always = restored(CopyRule(Delay(0.001, spread=0.01)))
    assert always.seconds > lab.seconds


@pytest.mark.parametrize("gate", ["full", "kv-only", "off"])
def test_gates_are_plans(gate: Literal["full", "kv-only", "off"]) -> None:
    found = [r.which.components for r in gate_plan(gate).rules if isinstance(r, CopyRule)]
    assert found == {"full": [], "kv-only": [("index_k",)], "off": [()]}[gate]


ON_THREADS = [Delay(0.05), Fail(), Shorten(), Corrupt(), FewerBytes()]


@pytest.mark.parametrize("fault", ON_THREADS, ids=lambda fault: type(fault).__name__)
async def test_copies_can_be_damaged_on_real_streams(fault: CopyFault) -> None:
    """The same rules, on worker threads."""
    plan = FaultPlan(rules=(CopyRule(fault, LOADS),))
    ports = EnginePorts(copier=FaultyCopier(plan))
    async with open_engine(toy_model(), STALE, ports=ports) as engine:
        await answer(engine, PROMPT, PARAMS)
        await trio.testing.wait_all_tasks_blocked(0.02)
        for seed in range(100, 104):
            await answer(engine, prompt_of(seed, 6 * PAGE), PARAMS)
        result = await answer(engine, PROMPT, PARAMS)
        honest = not isinstance(fault, Corrupt | FewerBytes)
        assert same(result, await COLD.answer(PROMPT, PARAMS)) is honest
        assert engine.statistics().ledger_ok


def test_real_streams_refuse_what_they_cannot_do() -> None:
    with pytest.raises(UsageError, match="simulated"):
        FaultyCopier(FaultPlan(rules=(CopyRule(Drop()),)))
