"""C16: counts that credited what nobody used, and corruption that nobody saw."""

import time

import pytest

from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import RequestAdmitted, RequestFinished
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import open_engine
from kvlease.runtime.event_log import EventLog
from tests.runtime.test_gate import make_host_only
from tests.runtime.toy import PAGE, FaultyCopier, answer, prompt_of, toy_config, toy_model

PARAMS = SamplingParams(max_tokens=4)
PROMPT = prompt_of(1, 6 * PAGE + 5)
FATES = ("use", "decline", "drop", "evict", "late", "no tail")


@pytest.mark.parametrize("fate", FATES)
async def test_every_token_looked_up_ends_in_one_bucket(fate: str) -> None:
    """K235 sglang#37503 (F20): hits were credited that had been declined, gauges were stale.

    A prefix on the host is used, declined, dropped because its load fails or is late, evicted
    before, or has lost its resume state: the buckets add up to the prompt, in the answer, in the
    log and in the counters.
    """

    def fault(order: CopyOrder) -> int | None:
        if order.kind == "load" and fate == "drop":
            raise OSError("down")
        if order.kind == "load" and fate == "late" and order.layer == 1:
            time.sleep(0.6)
        return None

    config = toy_config(
        device_pages=12, host_pages=60, load_timeout_s=0.4 if fate == "late" else 5.0
    )
    log = EventLog(None, "normal")
    events = log.remember()
    ports = EnginePorts(copier=FaultyCopier(fault))
    async with open_engine(toy_model(), config, log=log, ports=ports) as engine:
        await make_host_only(engine, PROMPT)
        core = engine._core
        memory, index = core.pool.memory, core.pool.index
        if fate == "decline":
            core.estimates.is_choosing = True
            core.estimates.bytes_per_s, core.estimates.tokens_per_s = 1.0, 1e9
        if fate == "evict":
            memory.take_back(index.evict_host(99))
        if fate == "no tail":
            memory.take_back(index.evict_tails(99, "device"))
            memory.take_back(index.evict_tails(99, "host"))
        before = engine.statistics().counters
        result = await answer(engine, PROMPT, PARAMS)
        after = engine.statistics().counters
    usage = result.usage
    assert usage.prompt == usage.hit_device + usage.hit_host + usage.computed == len(PROMPT)
    assert (usage.hit_host > 0) == (fate == "use")
    grown = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("prompt_tokens", "hit_device", "hit_host", "computed_tokens")
    }
    assert grown["prompt_tokens"] == len(PROMPT)
    assert grown["prompt_tokens"] == sum(grown.values()) - grown["prompt_tokens"]
    admitted = [e for e in events if isinstance(e, RequestAdmitted)][-1]
    assert admitted.used_tokens + sum(admitted.reasons.values()) == len(PROMPT)
    assert sum(admitted.hit_pages) * PAGE == admitted.used_tokens
    finished = [e for e in events if isinstance(e, RequestFinished)][-1]
    assert finished.usage == usage
