"""Admission: who runs next, on which cached prefix, and with which load.

First come, first served among those that can run now; a request whose next page is just being
computed by another waits for that page instead of computing it again. A request is admitted whole
(pages for its prompt are promised) or not at all.
"""

from __future__ import annotations

from enum import Enum
from typing import final

from kvlease.pools.held import Held
from kvlease.pools.prefix_results import Match
from kvlease.protocols.events import RequestAdmitted
from kvlease.protocols.identity import tenant_name
from kvlease.runtime.core import EngineCore
from kvlease.runtime.estimates import Choice
from kvlease.runtime.sequence import Phase, Sequence


class Verdict(Enum):
    """What became of an attempt to admit."""

    ADMITTED = "admitted"
    LATER = "later"
    """Another request is computing this one's next page; others may go first."""
    FULL = "full"
    """No room now; nobody behind may overtake."""


@final
class Admission:
    """Turns waiting sequences into running ones; owns no state of its own."""

    def __init__(self, core: EngineCore) -> None:
        """Borrows the core for the life of the engine."""
        self._core = core

    def admit(self) -> int:
        """Admit from the queue's front while there is room; return how many were admitted."""
        core = self._core
        passed: list[Sequence] = []
        admitted = 0
        while core.waiting and len(core.running) < core.config.max_sessions:
            seq = core.waiting.popleft()
            verdict = self._try(seq)
            if verdict is Verdict.ADMITTED:
                admitted += 1
                continue
            passed.append(seq)
            if verdict is Verdict.FULL:
                break
        core.waiting.extendleft(reversed(passed))
        return admitted

    def _try(self, seq: Sequence) -> Verdict:
        core = self._core
        if not core.pool.could_have(seq.pages_short):
            return Verdict.FULL
        tokens = seq.token_bytes() if seq.request.output else seq.request.prompt
        limit = (seq.num_tokens - 1) // seq.page_tokens
        reusing = core.config.prefix_cache and not seq.avoids_cache
        root = core.root_of(seq.request.salt)
        match = core.pool.match(root, tokens, limit if reusing else 0)
        if self._is_being_computed(seq, tokens, match):
            core.pool.drop(match)
            return Verdict.LATER
        choice = self._choose(match)
        if not choice.load:
            on_device = _leading_device_pages(match)
            core.pool.drop(match)
            match = core.pool.match(root, tokens, on_device)
            if match.host_pages:  # the cut-back tail's own pages may be host only
                core.pool.drop(match)
                match = core.pool.match(root, tokens, 0)
        total_pages = -(-seq.num_tokens // seq.page_tokens)
        held = core.pool.open(match, total_pages - match.num_pages, seq.request.id)
        if held is None:
            seq.pages_short = total_pages - match.device_pages
            core.pool.drop(match)
            return Verdict.FULL
        seq.pages_short = 0
        if core.pool.audit is not None:
            held.trail = core.pool.audit.begin(held.lease, match, root, tokens)
        self._start(seq, held, match, choice)
        return Verdict.ADMITTED

    def _is_being_computed(self, seq: Sequence, tokens: bytes, match: Match) -> bool:
        """Whether a running prefill will soon make more of this sequence's prefix usable."""
        core = self._core
        if not core.config.prefix_cache or seq.avoids_cache:
            return False
        first = match.num_pages * seq.page_tokens
        return any(
            self._will_share(other, seq, tokens, first)
            for other in core.running
            if other.phase is Phase.PREFILL and other.request.salt == seq.request.salt
        )

    def _will_share(self, other: Sequence, seq: Sequence, tokens: bytes, first: int) -> bool:
        """Whether ``other`` computes the next stretch that ``seq`` misses, up to a usable end."""
        core = self._core
        # Most prompts part at once: the first token tells that without a look at the rest.
        one = slice(first, first + 1)
        if first > other.num_computed or other.tokens[one] != seq.tokens[one]:
            return False
        if core.schema.needs_tail:
            end = other.next_tail(max(first, other.num_computed), core.config.tail_every)
        else:
            end = first + seq.page_tokens
        if end is None or not other.num_computed < end <= seq.last_boundary:
            return False
        mine = tokens[4 * first : 4 * end]
        return mine == other.tokens[first:end].tobytes() and (
            tokens[: 4 * first] == other.tokens[:first].tobytes()
        )

    def _choose(self, match: Match) -> Choice:
        """Decide between loading the host pages of a match and computing them."""
        if match.host_pages == 0:
            return Choice(load=True, load_s=0.0, recompute_s=0.0)
        schema = self._core.schema
        nbytes = match.host_pages * schema.page_nbytes + schema.tail_nbytes
        choice = self._core.estimates.choose(nbytes, match.host_pages * schema.page_tokens)
        self._core.counters.recompute_choices += not choice.load
        return choice

    def _start(self, seq: Sequence, held: Held, match: Match, choice: Choice) -> None:
        core = self._core
        for planned in held.arrivals:
            if planned not in core.transfers:
                core.start_transfer(planned)
            held.lease.pending.append(core.transfers[planned])
        seq.held = held
        seq.num_computed = match.num_pages * seq.page_tokens
        seq.branch = match.matched_pages * seq.page_tokens
        seq.phase = Phase.PREFILL
        core.running.append(seq)
        request = seq.request
        again = request.is_admitted
        if not again:
            request.is_admitted = True
            request.hit_device = match.device_pages * seq.page_tokens
            request.hit_host = match.host_pages * seq.page_tokens
        if core.sink.normal:
            event = _admitted_event(seq, match, choice, again=again)
            root = core.root_of(request.salt)
            if root != core.first_root:
                event.identity = root.hex()
            if request.salt != core.config.tenant_salt:
                event.tenant = tenant_name(request.salt)
            core.sink.emit(event)


def _leading_device_pages(match: Match) -> int:
    """Pages of a match before its first host-only page."""
    for number, page in enumerate(match.pages):
        if page < 0:
            return number
    return match.num_pages


def _admitted_event(seq: Sequence, match: Match, choice: Choice, *, again: bool) -> RequestAdmitted:
    page_tokens = seq.page_tokens
    used = match.num_pages * page_tokens
    reasons: dict[str, int] = {}
    no_tail = match.matched_pages * page_tokens - used
    if no_tail:
        reasons["no_tail"] = no_tail
    rest = seq.num_tokens - used - no_tail
    if seq.num_failed_loads:
        reasons["load_failed"] = rest
    elif seq.num_preempted:
        reasons["partial_page"] = rest
    else:
        reasons["new"] = rest
    decision = ""
    if choice.load_s or not choice.load:
        decision = "load" if choice.load else "recompute"
    return RequestAdmitted(
        request=seq.request.id,
        matched_tokens=match.matched_pages * page_tokens,
        used_tokens=used,
        hit_pages=(match.device_pages, match.host_pages, 0, 0),
        reasons=reasons,
        decision=decision,
        load_us=round(choice.load_s * 1e6),
        recompute_us=round(choice.recompute_s * 1e6),
        again=again,
    )
