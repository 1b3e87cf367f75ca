"""Logs that the real engine wrote: clean under every honest fault, told apart from every lie."""

import pytest
import trio

from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import LogClose
from kvlease.runtime.engine import Engine
from kvlease.services.lab.faults import (
    CopyFault,
    CopyRule,
    Delay,
    DoneEarly,
    Drop,
    Fail,
    FaultPlan,
    KillActor,
    NeverDone,
    Reorder,
    Rule,
    Shorten,
    StallMailbox,
    Which,
)
from kvlease.services.lab.spec import DeviceSpec, LinkSpec
from kvlease.services.replay.checker import check
from kvlease.services.replay.verdict import Verdict
from tests.lab.rig import PARAMS, PROMPT, Lab, make_host_only, serve
from tests.runtime.toy import answer, prompt_of, toy_config

SOME = Which(direction="load", probability=0.1)
LOADS = Which(direction="load")
INDEX_K = Which(direction="load", components=("index_k",))
PRESSED = toy_config(device_pages=30, load_timeout_s=2.0, tail_every=1)
SLOW = DeviceSpec(load=LinkSpec(latency_s=0.1, bytes_per_s=1e6))


def judged(lab: Lab) -> Verdict:
    """The verdict on the run's log, closed in order behind its engine's end."""
    last = lab.events[-1]
    close = LogClose(events=last.seq, seq=last.seq + 1, t_ns=last.t_ns, actor="log")
    return check([*lab.events, close])


def explained(verdict: Verdict) -> object:
    """What a failing test shows: counts, the first violations, and what was in doubt."""
    return verdict.violation_counts, verdict.violations[:3], verdict.cannot_tell


async def life(engine: Engine) -> None:
    """Sessions over several turns, some called off, one forked, a reader beside, a flush."""
    prompts = [prompt_of(seed, 70 + 9 * seed % 60, 64) for seed in range(8)]
    for turn in range(2):
        with trio.CancelScope() as gone:

            async def called_off(scope: trio.CancelScope = gone, turn: int = turn) -> None:
                async with engine.generate(
                    prompt_of(50 + turn, 90), SamplingParams(max_tokens=40)
                ) as stream:
                    async for _ in stream:
                        scope.cancel()

            await called_off()
        results = await serve(engine, prompts, PARAMS, 6)
        prompts = [
            [*prompt, *result.tokens, *prompt_of(100 * turn + number, 30)]
            for number, (prompt, result) in enumerate(zip(prompts, results, strict=True))
        ]
        if turn == 0:
            await engine.flush()
    async with engine.generate(prompts[0], PARAMS) as stream, engine.fork(stream) as branch:
        await stream.drain()
        await branch.drain()
    await trio.sleep(30)


async def one_restore(engine: Engine) -> None:
    await make_host_only(engine, PROMPT)
    await answer(engine, PROMPT, PARAMS)
    await trio.sleep(60)


HONEST: dict[str, tuple[Rule, ...]] = {
    "nothing": (),
    "loads that fail": tuple(
        CopyRule(fault, SOME) for fault in (Delay(3.0), Fail(), Shorten(), Drop())
    ),
    "loads out of order, stores that fail": (
        CopyRule(Reorder(), LOADS),
        CopyRule(Fail(), Which(direction="store", probability=0.3)),
    ),
    "actors that die": tuple(
        KillActor(actor, message=4) for actor in ("loader", "prefill", "decode")
    ),
    "a mailbox that stalls": (StallMailbox("prefill", 1.0, message=3),),
}


@pytest.mark.parametrize("rules", HONEST.values(), ids=HONEST)
def test_a_whole_life_is_clean_whatever_honest_fault_it_meets(rules: tuple[Rule, ...]) -> None:
    lab = Lab(SLOW, PRESSED, FaultPlan(seed=5, rules=rules))
    lab.run(life)
    assert lab.statistics is not None
    assert lab.statistics.ledger_ok, lab.statistics.ledger_error
    verdict = judged(lab)
    assert verdict.verdict == "clean", explained(verdict)
    assert verdict.early_reads == 0
    assert verdict.event_counts["transfer.plan"] > 10
    assert verdict.event_counts["page.free"] > 20


@pytest.mark.parametrize(
    ("fault", "which"),
    [(DoneEarly(), INDEX_K), (DoneEarly(), LOADS)],
    ids=["kv-only", "off"],
)
def test_every_read_that_came_early_is_found(fault: CopyFault, which: Which) -> None:
    """As many as the device itself knows of, each by its layer, component and request."""
    config = toy_config(device_pages=24, load_timeout_s=2.0, poison=False)
    lab = Lab(SLOW, config, FaultPlan(seed=3, rules=(CopyRule(fault, which),)))
    lab.run(one_restore)
    assert lab.device is not None
    early = lab.device.truth.early
    assert early
    verdict = judged(lab)
    assert verdict.verdict == "violations"
    assert verdict.early_reads == len(early), explained(verdict)
    found = {
        (one.step, one.lease, one.layer, one.component)
        for one in verdict.violations
        if one.lease is not None
    }
    assert found == {(one.step, one.lease, one.layer, one.component) for one in early}
    assert set(verdict.violation_counts) <= {"R2", "R6"}


def test_a_completion_that_never_comes_is_late_and_no_fault_of_the_rules() -> None:
    config = toy_config(device_pages=24, load_timeout_s=2.0)
    lab = Lab(SLOW, config, FaultPlan(seed=3, rules=(CopyRule(NeverDone(), INDEX_K),)))
    lab.run(one_restore)
    verdict = judged(lab)
    assert verdict.verdict == "clean", explained(verdict)
    assert verdict.event_counts["transfer.late"] > 0
    assert verdict.slowest_transfers[0].ended == "late"
