"""A request's running state in the scheduler: its tokens, what is computed, what it holds.

Pure book-keeping between two steps; it decides nothing about pages or batches.
"""

from __future__ import annotations

from array import array
from enum import Enum

from attrs import define, field

from kvlease.errors import KVLeaseError
from kvlease.pools.held import Held
from kvlease.runtime.request import Request


class Phase(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@define(eq=False)
class Sequence:
    """One request between submission and its end.

    ``tokens`` are prompt and answer so far; rows exist for the first ``num_computed``. ``ending``
    is why it will end as soon as the step it is in is over.
    """

    request: Request
    tokens: array[int]
    page_tokens: int
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    branch: int = 0
    """Boundary at which its prompt leaves a path that was cached when it was admitted; 0: none."""
    held: Held | None = None
    in_step: bool = False
    ending: str | None = None
    error: KVLeaseError | None = None
    num_preempted: int = 0
    num_failed_loads: int = 0
    num_restarts: int = 0
    pages_short: int = 0
    """Pages that the last attempt to admit it found missing; no use trying sooner."""
    recompute_below: int = field(default=0)
    """Positions below this had been computed once already; computing them again is counted."""

    @property
    def avoids_cache(self) -> bool:
        """Whether loads have failed it so often that it computes everything itself."""
        return self.num_failed_loads >= 2

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far, in tokens."""
        return len(self.tokens)

    @property
    def full_pages(self) -> int:
        """Whole pages among the computed tokens."""
        return self.num_computed // self.page_tokens

    @property
    def last_boundary(self) -> int:
        """The last page boundary at which a later, equal prompt could resume, in tokens."""
        return (self.num_tokens - 1) // self.page_tokens * self.page_tokens

    def token_bytes(self, first: int = 0, end: int | None = None) -> bytes:
        """Return the tokens from ``first`` to before ``end`` (all by default) as int32 bytes."""
        return self.tokens[first:end].tobytes()

    def next_tail(self, after: int, tail_every: int) -> int | None:
        """Return the first boundary past ``after`` tokens where a tail of the prompt is kept.

        At every ``tail_every`` pages, where this prompt was seen to leave a path that is cached
        already (others will leave it there too), and at the last boundary of the prompt.
        """
        last = self.last_boundary
        if after >= last:
            return None
        stride = tail_every * self.page_tokens
        nearest = min(last, (after // stride + 1) * stride)
        return self.branch if after < self.branch < nearest else nearest

    def next_cut(self, tail_every: int) -> int:
        """Return where the current prefill chunk has to end at the latest, in tokens.

        A tail can be copied only right after the step that reaches its boundary.
        """
        tail = self.next_tail(self.num_computed, tail_every)
        return self.num_tokens if tail is None else tail

    def keeps_tail(self, boundary: int, tail_every: int) -> bool:
        """Whether policy wants a tail that stays at this boundary (a turn's end aside)."""
        pages, rest = divmod(boundary, self.page_tokens)
        return rest == 0 and (
            pages % tail_every == 0 or boundary in (self.branch, self.last_boundary)
        )

    def require_held(self) -> Held:
        """Return what the sequence holds; only a running one holds anything."""
        assert self.held is not None, "a running sequence holds pages"
        return self.held
