"""What exploration has found in the runtime, each once and by hand."""

import math
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import pytest
import trio

from kvlease.protocols.config import SamplingParams
from kvlease.protocols.event_pages import PageQuarantine
from kvlease.protocols.ports import CopyOrder
from kvlease.runtime.actor import Inbox
from kvlease.runtime.assembly import EnginePorts
from kvlease.runtime.engine import open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.messages import TransferEnded, TransferSettled
from kvlease.services.lab.explore import run_once
from kvlease.services.lab.scenarios import SCENARIOS
from kvlease.services.lab.schedule import Replay, choices_of
from tests.museum.rig import MLA, Bench, tokens_of
from tests.museum.rig import PAGE as BENCH_PAGE
from tests.runtime.toy import (
    COLD,
    PAGE,
    FaultyCopier,
    answer,
    prompt_of,
    same,
    toy_config,
    toy_model,
)

M = TypeVar("M")


class LossesLast(Generic[M]):
    """An inbox in which the word of a failed transfer is read long after everything else."""

    def __init__(self, mailbox: Mailbox[M]) -> None:
        self._mailbox = mailbox
        self._kept: deque[M] = deque()

    @property
    def name(self) -> str:
        return self._mailbox.name

    def __aiter__(self) -> AsyncIterator[M]:
        return self._mailbox.__aiter__()

    def receive_nowait(self) -> M:
        while True:
            message = self._mailbox.receive_nowait()
            if not self._keeps(message):
                return message

    async def receive(self) -> M:
        with trio.move_on_after(0.2 if self._kept else math.inf):
            while True:
                message = await self._mailbox.receive()
                if not self._keeps(message):
                    return message
        return self._kept.popleft()

    def _keeps(self, message: M) -> bool:
        is_loss = isinstance(message, TransferEnded | TransferSettled) and (
            message.transfer.problem is not None
        )
        if is_loss:
            self._kept.append(message)
        return is_loss


def losses_last(mailbox: Mailbox[M], /) -> Inbox[M]:
    return LossesLast(mailbox) if mailbox.name == "scheduler" else mailbox


@pytest.mark.parametrize("reason", ["raises", "short"])
async def test_a_step_that_fails_before_its_load_is_known_to_have_failed(reason: str) -> None:
    """R9: the step's end may reach the scheduler first; the request must not join the dead load.

    Found by the scenario ``shared``: the request was admitted four times onto the load that had
    failed already, and then failed itself ("its step failed 4 times").
    """

    def fault(order: CopyOrder) -> int | None:
        if order.kind != "load" or order.layer != 1:
            return None
        if reason == "raises":
            raise OSError("the link is down")
        return 0

    prompt, params = prompt_of(1, 6 * PAGE + 5), SamplingParams(max_tokens=4)
    ports = EnginePorts(copier=FaultyCopier(fault), inboxes=losses_last)
    with trio.fail_after(30):
        async with open_engine(toy_model(), toy_config(device_pages=24), ports=ports) as engine:
            await answer(engine, prompt, params)
            for seed in range(100, 104):
                await answer(engine, prompt_of(seed, 6 * PAGE), params)
            result = await answer(engine, prompt, params)
            statistics = engine.statistics()
        assert same(result, await COLD.answer(prompt, params))
        assert statistics.counters.failed_transfers == 1
        assert statistics.counters.discarded_steps == 1
        assert statistics.ledger_ok, statistics.ledger_error


def test_who_shares_a_lost_load_is_put_into_no_step_before_the_loader_says_so() -> None:
    """R6: a step's end told of the loss; a sharer beside it was given a step on the lost pages.

    Those waited for the steps of that moment only, and were free while the new step read them.
    """
    choices = choices_of(
        "6:4,7:3,8:4,9:3,10:4,11:3,12:4,13:4,39:1,40:1,41:1,42:1,43:1,44:1,45:1,46:2"
    )
    assert run_once(SCENARIOS["shared"], 686, Replay(choices)).problem is None


def test_what_pages_wait_for_is_named_in_the_order_of_its_plans() -> None:
    """R14: equal runs write equal logs, wherever their objects lie in memory.

    Found by a planted bug of the exploration, whose failure the same choices did not repeat.
    """
    log = EventLog(flush_every_s=math.inf, threads=False)
    events = log.remember()
    bench = Bench(MLA, device_pages=32, host_pages=32, slots=8, log=log)
    prompts = [tokens_of(seed, 2 * BENCH_PAGE) for seed in range(1, 9)]
    for prompt in prompts:
        bench.cache_on_host(prompt)
    loads = [bench.start(prompt).load for prompt in prompts]
    assert loads[0] is not None
    bench.pool.lost(loads[0], "failed", ())
    waits = [event for event in events if isinstance(event, PageQuarantine)]
    numbers = [load.id for load in loads if load is not None]
    assert len(numbers) == 8
    assert waits[-1].transfers == numbers == sorted(numbers)
