"""Batching: which sequences the next prefill step and the next decode step take, and how far.

Prefill takes chunks in rotation up to a budget of tokens, so that one long prompt holds nobody up;
sequences whose pages are still arriving run in steps of their own, so that a failed load discards
only them. Decode takes everyone who is ready. A step gets its pages and tail slots here.
"""

from __future__ import annotations

from typing import final

from attrs import frozen

from kvlease.protocols.ports import SequenceInput, StepInput
from kvlease.runtime.core import EngineCore
from kvlease.runtime.messages import KeepTail, StepKind, StepOrder
from kvlease.runtime.sequence import Phase, Sequence


@frozen
class _Part:
    """One sequence's share of a step, planned but not yet taken."""

    seq: Sequence
    end: int
    """Tokens computed when the step is over, if it produces all that it may."""
    may_produce: int
    samples: bool


@final
class Batching:
    """Builds step orders; owns only the rotation of prefill."""

    def __init__(self, core: EngineCore) -> None:
        """Borrows the core for the life of the engine."""
        self._core = core
        self._turn = 0

    def prefill(self) -> StepOrder | None:
        """Return the next prefill step, or None if nobody needs one."""
        group = self._prefill_group()
        budget = self._core.chunk_tokens
        parts: list[_Part] = []
        for seq in group:
            if budget <= 0:
                break
            end = min(seq.next_cut(self._core.config.tail_every), seq.num_computed + budget)
            part = _Part(seq, end, 1, samples=end == seq.num_tokens)
            if self._pages_for(part):
                parts.append(part)
                budget -= end - seq.num_computed
        return self._order("prefill", parts)

    def _prefill_group(self) -> list[Sequence]:
        """Sequences in prefill in rotation: those with nothing pending, else those with loads."""
        waiting = [s for s in self._core.in_phase(Phase.PREFILL) if s.ending is None]
        settled = [s for s in waiting if s.held is not None and not s.held.lease.pending]
        group = settled or waiting
        if not group:
            return []
        self._turn += 1
        shift = self._turn % len(group)
        return group[shift:] + group[:shift]

    def decode(self) -> StepOrder | None:
        """Return the next decode step, or None if nobody is ready."""
        parts: list[_Part] = []
        ready = [seq for seq in self._core.in_phase(Phase.DECODE) if seq.ending is None]
        for seq, produce in zip(ready, self._may_produce(ready), strict=True):
            part = _Part(seq, seq.num_computed + produce, produce, samples=True)
            if self._pages_for(part):
                parts.append(part)
        return self._order("decode", parts)

    def _may_produce(self, ready: list[Sequence]) -> list[int]:
        """Tokens one decode step may return of each: up to the page's end without arithmetic.

        With it the same of all, and more than one only where no prefill is kept waiting. A tail
        can be kept only right after the step that reaches its boundary, so none goes past a page's
        end.
        """
        arithmetic = self._core.config.compute == "model"
        if arithmetic and not self._may_run_ahead(ready):
            return [1] * len(ready)
        left = [
            min(
                seq.request.params.max_tokens - len(seq.request.output),
                seq.page_tokens - seq.num_computed % seq.page_tokens,
            )
            for seq in ready
        ]
        return [min(self._core.decode_ahead, *left)] * len(ready) if arithmetic else left

    def _may_run_ahead(self, ready: list[Sequence]) -> bool:
        """Whether all decode, greedily and on pages that are there.

        A prefill would have to wait for such a step. Who waits for a place has to wait for an
        answer's end in any case, and such steps bring it nearer.
        """
        core, eos = self._core, self._core.model.eos_tokens
        return (
            core.decode_ahead > 1
            and bool(ready)
            and all(seq.phase is Phase.DECODE for seq in core.running)
            and all(seq.request.sampling(eos).is_greedy for seq in ready)
            and not any(seq.require_held().lease.pending for seq in ready)
        )

    def _pages_for(self, part: _Part) -> bool:
        """Make the sequence's table reach the end of its part; False if pages are short now."""
        held = part.seq.require_held()
        needed = -(-part.end // part.seq.page_tokens) - len(held.lease.pages)
        return needed <= 0 or self._core.pool.grow(held, needed, part.seq.request.id)

    def _order(self, kind: StepKind, parts: list[_Part]) -> StepOrder | None:
        if not parts:
            return None
        core = self._core
        members = tuple(part.seq for part in parts)
        inputs = StepInput(
            core.next_step(),
            tuple(self._input(part) for part in parts),
            digests=core.config.digests,
        )
        leases = [seq.require_held().lease for seq in members]
        lease = core.pool.lease_step(leases, inputs.step)
        order = StepOrder(
            kind, members, inputs, lease, self._keeps(parts), core.clock.now(), core.hand_over
        )
        for seq in members:
            seq.in_step = True
        core.steps[kind] = order
        return order

    def _input(self, part: _Part) -> SequenceInput:
        seq, start = part.seq, part.seq.num_computed
        end = start + 1 if seq.phase is Phase.DECODE else part.end
        sample = seq.request.sampling(self._core.model.eos_tokens) if part.samples else None
        return SequenceInput(seq.request.id, start, seq.tokens[start:end], sample, part.may_produce)

    def _keeps(self, parts: list[_Part]) -> tuple[KeepTail, ...]:
        """Take a tail slot for every member whose step ends at a boundary worth keeping.

        While decoding every boundary is: it may turn out to be the turn's last.
        """
        core = self._core
        if not core.schema.needs_tail or not core.config.prefix_cache:
            return ()
        keeps: list[KeepTail] = []
        for member, part in enumerate(parts):
            seq = part.seq
            at_boundary = part.end % seq.page_tokens == 0
            wanted = seq.phase is Phase.DECODE or seq.keeps_tail(part.end, core.config.tail_every)
            if at_boundary and wanted:
                slot = core.pool.tail_slot()
                if slot is not None:
                    keeps.append(KeepTail(member, part.end, slot))
        return tuple(keeps)
