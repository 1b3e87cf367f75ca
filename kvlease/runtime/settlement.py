"""Settlement: what a finished step, a finished transfer, or an early end means for sequences.

Tokens are published and pages sealed only here, after the step has been verified (R2); every way
a sequence can leave the running set goes through `retire` or `restart`, so that its pages come back
on each of them.
"""

from __future__ import annotations

from typing import final

from kvlease.errors import (
    InternalError,
    KVLeaseError,
    PageMismatch,
    PagesUnavailable,
    RequestFailed,
)
from kvlease.pools.held import PlannedTransfer
from kvlease.protocols.events import RequestPreempted
from kvlease.protocols.ports import CompletionState, SampledToken
from kvlease.runtime.completions import BAD_STATES
from kvlease.runtime.core import EngineCore
from kvlease.runtime.endings import end_request
from kvlease.runtime.journal import StepJournal
from kvlease.runtime.messages import KeepTail, StepEnded, StepOrder
from kvlease.runtime.mismatches import drop_mismatches
from kvlease.runtime.request import TokenEvent
from kvlease.runtime.sequence import Phase, Sequence
from kvlease.runtime.transfer import Transfer

MAX_RESTARTS = 3
"""Step failures of one request's own making before it is failed instead of tried again."""

LEDGER_EVERY = 256
"""Steps between two lines of the pools' own count in the log."""

STORE_PAGES = 32
"""Pages that a long prefill or decode seals before they are stored together; one transfer of many
pages costs little more than one of a few."""


@final
class Settlement:
    """Applies ends; owns no state of its own."""

    def __init__(self, core: EngineCore) -> None:
        """Borrows the core for the life of the engine."""
        self._core = core
        self._journal = StepJournal(core.sink, core.stalls)

    # -- steps ---------------------------------------------------------------------------------

    def step_ended(self, ended: StepEnded) -> None:
        """Publish a verified step, or discard it and start its sequences over."""
        core, order = self._core, ended.order
        if ended.tokens is None:
            for seq in order.members:
                self._notice_losses(seq)  # while the step still blocks the reuse of its pages
        core.steps[order.phase] = None
        order.is_settled = True
        core.counters.steps += 1
        if core.counters.steps % LEDGER_EVERY == 0:
            core.pool.say_ledger()
        for seq in order.members:
            seq.in_step = False
        if order.is_spoiled and ended.tokens is not None:
            ended = StepEnded(order, None, PageMismatch("a page that it read was found changed"))
        for check in order.lease.checks:
            core.counters.audited_pages += check.num_pages
        if ended.tokens is None:
            self._discard(order, ended.error)
            return
        self._learn_rate(order)
        before = [len(seq.request.output) for seq in order.members]
        reasons = [
            self._publish(seq, drawn) if drawn and seq.ending is None else None
            for seq, drawn in zip(order.members, ended.tokens, strict=True)
        ]
        published = [
            len(seq.request.output) - had for seq, had in zip(order.members, before, strict=True)
        ]
        self._journal.step_done(order, ended.tokens, published)
        keeps = {keep.member: keep for keep in order.keeps}
        for member, (seq, drawn) in enumerate(zip(order.members, ended.tokens, strict=True)):
            computed = len(order.inputs.sequences[member].tokens) + max(0, len(drawn) - 1)
            self._advance(seq, computed, keeps.get(member), reasons[member])
            if drawn and seq.phase is Phase.PREFILL:
                seq.phase = Phase.DECODE
                self._store(seq)

    def _learn_rate(self, order: StepOrder) -> None:
        if order.phase == "prefill":
            tokens = sum(len(part.tokens) for part in order.inputs.sequences)
            self._core.estimates.computed(tokens, self._core.clock.now() - order.started_s)

    def _advance(
        self,
        seq: Sequence,
        computed: int,
        keep: KeepTail | None,
        reason: str | None,
    ) -> None:
        """Count what a step computed, seal it, and end the sequence if it is complete."""
        before = seq.num_computed
        seq.num_computed = now = before + computed
        if now > seq.recompute_below:
            seq.num_restarts = 0  # new ground: what failed before is over
        if before < seq.recompute_below:
            seq.request.recomputed += min(now, seq.recompute_below) - before
        held = seq.require_held()
        held.lease.commit(now)
        if keep is not None or now // seq.page_tokens > held.lease.sealed:
            self._seal(seq, keep)
        if seq.ending is not None or reason is not None:
            self.retire(seq, reason)
        elif held.unstored_pages >= STORE_PAGES:
            self._store(seq)

    def _publish(self, seq: Sequence, drawn: tuple[SampledToken, ...]) -> str | None:
        """Hand over the step's tokens up to the answer's end; return why it ended, if it did."""
        core, request = self._core, seq.request
        eos, events, reason = core.model.eos_tokens, list[TokenEvent](), None
        index = len(request.output)
        for one in drawn:
            event = TokenEvent(index, one.token, one.logprob, one.top_logprobs, one.digest)
            events.append(event)
            index += 1
            reason = request.finish_reason(one.token, index, eos)
            if reason is not None:
                break
        seq.tokens.extend([event.token for event in events])
        request.publish(tuple(events))
        core.unsaid.append(request)
        return reason

    def _seal(self, seq: Sequence, keep: KeepTail | None) -> None:
        """Seal what the step filled, and show the tail that it kept."""
        core, held = self._core, seq.require_held()
        full = min(seq.full_pages, len(seq.tokens) // seq.page_tokens)
        if core.config.prefix_cache and full > held.lease.sealed:
            held.unstored_pages += full - held.lease.sealed
            tokens = seq.token_bytes(held.lease.sealed * seq.page_tokens, full * seq.page_tokens)
            core.pool.seal(held, tokens, full, seq.request.id)
        if keep is None:
            return
        if keep.boundary > held.lease.sealed * seq.page_tokens:
            core.pool.free_tail_slot(keep.tail_slot)
            return
        by_policy = keep.boundary // seq.page_tokens % core.config.tail_every == 0
        rolling = seq.phase is Phase.DECODE and not by_policy
        tail = core.pool.put_tail(held, keep.boundary, keep.tail_slot, rolling=rolling)
        if tail is not None and not rolling:
            held.unstored_tails.append(tail)

    def _discard(self, order: StepOrder, error: Exception | None) -> None:
        """Publish nothing of a step; its sequences start over from what is sealed (R2)."""
        core = self._core
        core.counters.discarded_steps += 1
        self._journal.step_discarded(order, error)
        for keep in order.keeps:
            core.pool.free_tail_slot(keep.tail_slot)
        for reader in drop_mismatches(core, order):
            self.restart(reader, "page_mismatch")
        # A load that failed or a page that changed is nobody's own making, least of all that of
        # those beside it.
        is_blameless = any(seq.require_held().is_lost for seq in order.members)
        for seq in order.members:
            held = seq.require_held()
            seq.num_restarts += not is_blameless
            if seq.ending is not None:
                self.retire(seq)
            elif seq.num_restarts > MAX_RESTARTS:
                message = f"request {seq.request.id}: its step failed {MAX_RESTARTS + 1} times"
                seq.ending, seq.error = "failed", RequestFailed(f"{message}: {error}")
                self.retire(seq)
            else:
                reason = "load_failed" if held.is_lost else "step_failed"
                self.restart(seq, "page_mismatch" if held.is_spoiled else reason)
        self._restart_lost()

    # -- transfers -----------------------------------------------------------------------------

    def transfer_ended(self, transfer: Transfer) -> None:
        """Tell the index and the readers; a failed load makes its readers start over (R9)."""
        core = self._core
        planned = core.planned[transfer.plan.id]
        is_done = transfer.state is CompletionState.DONE
        if is_done:
            core.pool.transfers.done(planned)
            self._count_done(planned, transfer)
        elif not planned.is_lost:
            self._lost(planned, transfer)
        if not is_done:
            self._restart_lost()
            return
        for seq in core.running:
            held = seq.held
            if held is not None and planned in held.arrivals:
                held.arrivals.remove(planned)
                held.lease.pending.remove(transfer)

    def _restart_lost(self) -> None:
        """Let every sequence start over that shares a load known to be lost, if it is in no step.

        At once: its pages wait for the steps of this moment only, and no new one may have them.
        """
        for seq in list(self._core.running):
            if not seq.in_step and seq.require_held().is_lost:
                self.restart(seq, "load_failed")

    def _notice_losses(self, seq: Sequence) -> None:
        """Take note of loads that ended badly although the loader's word of it is still to come.

        A sequence that started over without it would be put on the same dead load again.
        """
        for planned in seq.require_held().arrivals:
            transfer = self._core.transfers.get(planned)
            if transfer is not None and transfer.state in BAD_STATES and not planned.is_lost:
                self._lost(planned, transfer)

    def _lost(self, planned: PlannedTransfer, transfer: Transfer) -> None:
        core = self._core
        reason = "failed" if transfer.problem is None else transfer.problem.reason
        core.counters.failed_transfers += 1
        core.counters.transfer_timeouts += reason == "late"
        under_way = [step for step in core.steps.values() if step is not None]
        core.pool.lost(planned, reason, under_way)

    def _count_done(self, planned: PlannedTransfer, transfer: Transfer) -> None:
        counters = self._core.counters
        if planned.kind == "load":
            counters.loads += 1
            counters.restored_bytes += planned.nbytes
            seconds = self._core.clock.now() - transfer.planned_at
            self._core.estimates.loaded(planned.nbytes, seconds)
        else:
            counters.stores += 1
            counters.stored_bytes += planned.nbytes

    def transfer_settled(self, transfer: Transfer) -> None:
        """Forget a transfer whose copies have all returned; its ends are free already."""
        planned = self._core.planned.pop(transfer.plan.id)
        del self._core.transfers[planned]
        self._core.stalls.forget(transfer)

    def _store(self, seq: Sequence) -> None:
        """Copy newly sealed pages to the host as the write policy asks, if there is room."""
        core, held = self._core, seq.require_held()
        policy = core.config.write_policy
        if policy == "back" or not core.config.host_pages or not core.config.prefix_cache:
            return
        # A page counts as asked for again once a second request has found it in the index.
        min_hits = 1 if policy == "selective" else 0
        tails, held.unstored_tails, held.unstored_pages = held.unstored_tails, [], 0
        try:
            planned = core.pool.transfers.plan_store(held, seq.request.id, min_hits, tails)
        except PagesUnavailable:
            core.counters.skipped_stores += 1
            return
        if planned is not None:
            core.start_transfer(planned)

    # -- leaving the running set ---------------------------------------------------------------

    def retire(self, seq: Sequence, reason: str | None = None) -> None:
        """End a sequence that is in no step: give its pages back and make its request terminal."""
        core = self._core
        if seq.in_step:
            raise InternalError(
                f"request {seq.request.id} was ended while a step uses its pages; it ends when the"
                " step has",
                "R6",
            )
        if seq.held is not None:
            if seq.held.rolling_tail is not None:
                seq.held.unstored_tails.append(seq.held.rolling_tail)
            self._store(seq)
            core.pool.close(seq.held)
            seq.held = None
            core.running.remove(seq)
        elif seq in core.waiting:
            core.waiting.remove(seq)
        seq.phase = Phase.ENDED
        self._terminate(seq, reason or seq.ending or "failed", seq.error)

    def abandon_all(self) -> None:
        """Let go of all that still runs or waits; for an engine that is closing.

        What a step still uses is left as it is: its worker never told of its end (R6).
        """
        core = self._core
        error = RequestFailed("the engine was closed before the answer was complete")
        for seq in [*core.running, *core.waiting]:
            if seq.in_step:
                continue
            if seq.held is not None:
                core.pool.close(seq.held)
                seq.held = None
            seq.phase = Phase.ENDED
            self._terminate(seq, seq.ending or "failed", seq.error or error)
        core.running = [seq for seq in core.running if seq.in_step]
        core.waiting.clear()

    def _terminate(self, seq: Sequence, reason: str, error: KVLeaseError | None) -> None:
        core, request = self._core, seq.request
        end_request(core, request, reason, error)
        usage = request.usage()
        counters = core.counters
        counters.prompt_tokens += usage.prompt if request.is_admitted else 0
        counters.output_tokens += usage.output
        counters.hit_device += usage.hit_device
        counters.hit_host += usage.hit_host
        counters.computed_tokens += usage.computed
        counters.recomputed_tokens += usage.recomputed
        if error is not None:
            counters.failed += 1
            return
        core.estimates.served(core.clock.now() - request.submitted_s)
        counters.finished += reason != "cancelled"
        counters.cancelled += reason == "cancelled"

    def restart(self, seq: Sequence, reason: str) -> None:
        """Take a sequence off its pages and queue it first; what is sealed stays cached."""
        core = self._core
        held = seq.require_held()
        if held.is_lost:
            seq.num_failed_loads += 1
            if not seq.request.output and not seq.num_preempted:
                seq.request.forget_hits()  # they were none: its next admission counts (R12)
        else:
            seq.num_preempted += 1
            core.counters.preempted += 1
        kept = held.lease.sealed * seq.page_tokens
        seq.recompute_below = max(seq.recompute_below, seq.num_computed)
        if core.sink.normal:
            dropped = seq.num_computed - kept
            core.sink.emit(
                RequestPreempted(
                    request=seq.request.id, reason=reason, kept_tokens=kept, dropped_tokens=dropped
                )
            )
        self._store(seq)
        core.pool.close(held)
        seq.held = None
        seq.num_computed = 0
        seq.phase = Phase.WAITING
        core.running.remove(seq)
        core.waiting.appendleft(seq)
