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

from kvlease.errors import (
    ActorBroken,
    ActorClosed,
    DeadlineExceeded,
    InternalError,
    PagesUnavailable,
    UsageError,
)
from kvlease.protocols.events import RequestCancelled
from kvlease.runtime.actor import Actor, Inbox
from kvlease.runtime.admission import Admission
from kvlease.runtime.batching import Batching
from kvlease.runtime.cache_duties import CacheDuties
from kvlease.runtime.completions import BAD_STATES
from kvlease.runtime.core import EngineCore
from kvlease.runtime.endings import end_request
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.messages import (
    Cancel,
    Flush,
    PagesGivenBack,
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
from kvlease.runtime.transfer import Transfer
from kvlease.units import RequestId


@final
class Scheduler(Actor[SchedulerMessage]):
    """Actor over one `EngineCore`; a restarted one goes on with the same core."""

    def __init__(
        self,
        core: EngineCore,
        mailbox: Inbox[SchedulerMessage],
        workers: dict[StepKind, Mailbox[StepOrder]],
    ) -> None:
        """Borrows the core, its own mailbox and the step workers' mailboxes."""
        super().__init__(mailbox)
        self._core = core
        self._workers = workers
        self._admission = Admission(core)
        self._batching = Batching(core)
        self._settlement = Settlement(core)
        self._duties = CacheDuties(core)
        self._by_request: dict[RequestId, Sequence] = {
            seq.request.id: seq for seq in (*core.waiting, *core.running)
        }
        self._deadlines = [(s.request.deadline_s, s.request.id) for s in self._by_request.values()]
        heapq.heapify(self._deadlines)
        self._last_write_back: Transfer | None = None
        self._drops_until = -math.inf

    async def run(self) -> None:
        """Serve until the mailbox closes; plans first, since a predecessor may have died before it.

        Raises InternalError when a message or a plan was left half done: the books may be wrong
        then, and a restarted scheduler would go on from them.
        """
        message: SchedulerMessage | None = None
        while True:
            self._take_turn(message)
            message = None
            try:
                with trio.move_on_after(self._until_deadline()):
                    message = await self.mailbox.receive()
            except ActorClosed:
                self._settlement.abandon_all()
                self._core.pool.controls.unpin_all("closed")
                self._core.pool.say_ledger()
                return

    def _take_turn(self, message: SchedulerMessage | None) -> None:
        """Apply what has come and plan once; all of it happens or the engine ends."""
        try:
            if message is not None:
                self.apply(message)
            self._apply_unread()
            self._expire()
            self._duties.tidy()
            self.plan()
            self._hand_over()
        except (UsageError, InternalError, AssertionError):
            raise
        except Exception as error:
            raise InternalError(
                f"the scheduler failed in the middle of its work: {error!r}; its books may be half"
                " written, so the engine ends"
            ) from error

    def _hand_over(self) -> None:
        """Give callers their tokens: behind the launch of the decode step that is about to run.

        What callers do takes this thread's time, and a device would stand still for as long. The
        step is launched at once, unless a prefill step is being launched before it.
        """
        decode = self._core.steps["decode"]
        if decode is None or decode.is_launched or self._core.steps["prefill"] is not None:
            self._core.hand_over()

    def _apply_unread(self) -> None:
        """Apply all that has come meanwhile, so that one plan serves a burst of messages."""
        try:
            while True:
                self.apply(self.mailbox.receive_nowait())
        except (trio.WouldBlock, ActorClosed, ActorBroken):
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
                message.done.send(None)
            case PagesGivenBack():
                pass  # the plan that follows is all that is wanted
            case StepEnded():
                self._settlement.step_ended(message)
                for seq in message.order.members:
                    self._has_ended(seq.request.id)
            case TransferEnded():
                self._settlement.transfer_ended(message.transfer)
                self._duties.transfer_ended(message.transfer)
            case TransferSettled():
                self._settlement.transfer_settled(message.transfer)
            case _:
                self._duties.apply(message)

    def _submit(self, request: Request) -> None:
        core = self._core
        tokens = request.prompt_tokens()
        seq = Sequence(request, tokens, core.schema.page_tokens)
        core.waiting.append(seq)
        core.counters.requests += 1
        self._by_request[request.id] = seq
        heapq.heappush(self._deadlines, (request.deadline_s, request.id))

    def _end_early(self, request: RequestId, reason: str, error: DeadlineExceeded | None) -> None:
        """End a request now, or as soon as the step that it is in is over.

        A caller whose deadline has passed hears of it at once, one who has left already too: the
        step may be waiting for a load that has a later one.
        """
        seq = self._by_request.get(request)
        if seq is None or seq.phase is Phase.ENDED:
            return
        if seq.ending is None:
            seq.ending, seq.error = reason, error
            if error is None and self._core.sink.normal:
                self._core.sink.emit(RequestCancelled(request=request))
        if not seq.in_step:
            self._settlement.retire(seq)
        elif error is not None:
            end_request(self._core, seq.request, seq.ending, seq.error)

    # -- deadlines -----------------------------------------------------------------------------

    def _until_deadline(self) -> float:
        while self._deadlines and self._has_ended(self._deadlines[0][1]):
            heapq.heappop(self._deadlines)
        next_s = self._duties.next_expiry_s
        if self._deadlines:
            next_s = min(next_s, self._deadlines[0][0])
        return max(0.0, next_s - self._core.clock.now())

    def _has_ended(self, request: RequestId) -> bool:
        seq = self._by_request.get(request)
        if seq is None or seq.phase is Phase.ENDED:
            self._by_request.pop(request, None)
            return True
        return False

    def _expire(self) -> None:
        now = self._core.clock.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            if self._has_ended(number):
                continue
            request = self._by_request[number].request
            seconds = request.deadline_s - request.submitted_s
            error = DeadlineExceeded(
                f"request {number} was not finished within its {seconds:g} s"
                " (request_timeout_s, or its own); its pages are given back"
            )
            self._end_early(number, "deadline", error)

    # -- planning ------------------------------------------------------------------------------

    def plan(self) -> None:
        """Admit and start steps; preempt for as long as those running wait for pages in vain.

        Nobody comes back from preemption before the others were tried without it. The last one is
        admitted again at once, because no message would ever tell to. Once the workers take no
        more steps the engine is closing, and nothing is planned.
        """
        core = self._core
        if any(worker.is_closed for worker in self._workers.values()):
            return
        core.pool.reclaim()
        self._go_on(admits=True)
        for _ in range(len(core.running)):
            if not self._is_stuck():
                return
            newest = core.running[-1]
            self._settlement.restart(newest, "pages")
            self._go_on(admits=not core.running)

    def _go_on(self, *, admits: bool) -> None:
        """Admit and start what the pool has room for, storing or dropping last copies for it."""
        pool = self._core.pool
        pool.unstored_pages = 0
        self._try_to_start(admits=admits)
        if pool.unstored_pages and not self._write_back(pool.unstored_pages):
            pool.spares_last_copies = False
            self._try_to_start(admits=admits)
            pool.spares_last_copies = True

    def _try_to_start(self, *, admits: bool) -> None:
        if admits:
            self._admission.admit()
        self._start("prefill")
        self._start("decode")

    def _start(self, kind: StepKind) -> None:
        if self._core.steps[kind] is not None:
            return
        order = self._batching.prefill() if kind == "prefill" else self._batching.decode()
        if order is not None:
            self._workers[kind].send_nowait(order)

    def _is_stuck(self) -> bool:
        """Whether nothing under way will bring pages, though somebody is running.

        A transfer that ended badly no longer counts: its last copy may never return.
        """
        core = self._core
        if not core.running or any(core.steps.values()):
            return False
        return all(transfer.state in BAD_STATES for transfer in core.transfers.values())

    def _write_back(self, num_pages: int) -> bool:
        """Store pages that have to make room, one store at a time; False if they must be dropped.

        After a store that failed, last copies are dropped for as long as a store may take, or a
        host that is down would hold everybody up for ever (R9).
        """
        core, last = self._core, self._last_write_back
        if last is not None:
            if last.state in BAD_STATES:
                self._last_write_back = None
                self._drops_until = core.clock.now() + core.config.load_timeout_s
            elif last in core.transfers.values():
                return True
        if core.clock.now() < self._drops_until:
            return False
        try:
            planned = core.pool.transfers.plan_write_back(num_pages)
        except PagesUnavailable:
            planned = None
        if planned is None:
            return False
        core.start_transfer(planned)
        self._last_write_back = core.transfers[planned]
        return True
