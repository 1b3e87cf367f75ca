"""The scheduler: the one task that decides who runs, and the only one that touches the pools.

It takes messages, applies them, and after each batch of messages plans: admit, start a prefill step
and a decode step if their workers are idle, preempt if nobody can go on. It never waits for device
work, so planning stays off the compute path.
"""

from __future__ import annotations

import heapq
import math
from typing import final

import trio

from kvlease.errors import ActorClosed, DeadlineExceeded, PagesUnavailable
from kvlease.protocols.events import RequestSubmitted
from kvlease.runtime.actor import Actor
from kvlease.runtime.admission import Admission
from kvlease.runtime.batching import Batching
from kvlease.runtime.core import EngineCore
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.messages import (
    Cancel,
    Flush,
    SchedulerMessage,
    StepEnded,
    StepKind,
    StepOrder,
    Submit,
    TransferEnded,
    TransferSettled,
)
from kvlease.runtime.request import Request
from kvlease.runtime.sequence import Phase, Sequence
from kvlease.runtime.settlement import Settlement
from kvlease.units import RequestId


@final
class Scheduler(Actor[SchedulerMessage]):
    """Actor over one `EngineCore`; a restarted one goes on with the same core."""

    def __init__(
        self,
        core: EngineCore,
        mailbox: Mailbox[SchedulerMessage],
        workers: dict[StepKind, Mailbox[StepOrder]],
    ) -> None:
        """Borrows the core, its own mailbox and the step workers' mailboxes."""
        super().__init__(mailbox)
        self._core = core
        self._workers = workers
        self._admission = Admission(core)
        self._batching = Batching(core)
        self._settlement = Settlement(core)
        self._by_request: dict[RequestId, Sequence] = {
            seq.request.id: seq for seq in (*core.waiting, *core.running)
        }
        self._deadlines = [(s.request.deadline_s, s.request.id) for s in self._by_request.values()]
        heapq.heapify(self._deadlines)

    async def run(self) -> None:
        """Serve until the mailbox closes."""
        while True:
            try:
                with trio.move_on_after(self._until_deadline()):
                    self.apply(await self.mailbox.receive())
                self._apply_unread()
            except ActorClosed:
                return
            self._expire()
            self.plan()

    def _apply_unread(self) -> None:
        """Apply all that has come meanwhile, so that one plan serves a burst of messages."""
        try:
            while True:
                self.apply(self.mailbox.receive_nowait())
        except trio.WouldBlock:
            return

    # -- messages ------------------------------------------------------------------------------

    def apply(self, message: SchedulerMessage) -> None:
        """Apply one message; plans nothing yet."""
        match message:
            case Submit():
                self._submit(message.request)
            case Cancel():
                self._end_early(message.request.id, "cancelled", None)
            case Flush():
                self._core.pool.flush()
                message.done.set()
            case StepEnded():
                self._settlement.step_ended(message)
            case TransferEnded():
                self._settlement.transfer_ended(message.transfer)
            case TransferSettled():
                self._settlement.transfer_settled(message.transfer)

    def _submit(self, request: Request) -> None:
        core = self._core
        tokens = request.prompt_tokens()
        seq = Sequence(request, tokens, core.schema.page_tokens)
        core.waiting.append(seq)
        core.counters.requests += 1
        self._by_request[request.id] = seq
        heapq.heappush(self._deadlines, (request.deadline_s, request.id))
        if core.sink.normal:
            core.sink.emit(
                RequestSubmitted(
                    request=request.id,
                    prompt_tokens=request.num_prompt,
                    max_tokens=request.params.max_tokens,
                    deadline_ns=round(request.deadline_s * 1e9),
                    parent=request.parent,
                )
            )

    def _end_early(self, request: RequestId, reason: str, error: DeadlineExceeded | None) -> None:
        """End a request now, or as soon as the step that it is in is over."""
        seq = self._by_request.get(request)
        if seq is None or seq.phase is Phase.ENDED or seq.ending is not None:
            return
        seq.ending, seq.error = reason, error
        if not seq.in_step:
            self._settlement.retire(seq)

    # -- deadlines -----------------------------------------------------------------------------

    def _until_deadline(self) -> float:
        while self._deadlines and self._has_ended(self._deadlines[0][1]):
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return math.inf
        return max(0.0, self._deadlines[0][0] - self._core.clock.now())

    def _has_ended(self, request: RequestId) -> bool:
        seq = self._by_request.get(request)
        if seq is None or seq.phase is Phase.ENDED:
            self._by_request.pop(request, None)
            return True
        return False

    def _expire(self) -> None:
        now = self._core.clock.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request = heapq.heappop(self._deadlines)
            seconds = self._core.config.request_timeout_s
            error = DeadlineExceeded(
                f"request {request} was not finished within its {seconds:g} s"
                " (request_timeout_s); its pages are free again"
            )
            self._end_early(request, "deadline", error)

    # -- planning ------------------------------------------------------------------------------

    def plan(self) -> None:
        """Admit, start steps, and preempt if somebody is short of pages that nothing will free."""
        core = self._core
        core.pool.reclaim()
        core.pool.unstored_pages = 0
        self._admission.admit()
        self._start("prefill")
        self._start("decode")
        if core.pool.unstored_pages and not self._write_back(core.pool.unstored_pages):
            self._plan_dropping()
        if self._is_stuck():
            self._preempt_newest()

    def _plan_dropping(self) -> None:
        """Plan again with last copies given up: the host has no room for them."""
        pool = self._core.pool
        pool.spares_last_copies = False
        self._admission.admit()
        self._start("prefill")
        self._start("decode")
        pool.spares_last_copies = True

    def _start(self, kind: StepKind) -> None:
        if self._core.steps[kind] is not None:
            return
        order = self._batching.prefill() if kind == "prefill" else self._batching.decode()
        if order is not None:
            self._workers[kind].send_nowait(order)

    def _is_stuck(self) -> bool:
        """Whether no step and no transfer is under way, though somebody is running."""
        core = self._core
        return bool(core.running) and not any(core.steps.values()) and not core.transfers

    def _preempt_newest(self) -> None:
        core = self._core
        newest = max(core.running, key=lambda seq: seq.admitted_order)
        self._settlement.restart(newest, "pages")
        self._start("prefill")
        self._start("decode")

    def _write_back(self, num_pages: int) -> bool:
        """Start storing pages that have to make room; say whether that was possible."""
        core = self._core
        try:
            planned = core.pool.transfers.plan_write_back(num_pages)
        except PagesUnavailable:
            planned = None
        if planned is None:
            return False
        core.start_transfer(planned)
        return True
