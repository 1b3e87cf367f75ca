"""What the scheduler's parts share: the pools, the model, the counters, and who is running.

One object per engine, owned by the engine's scope, so that it survives a restart of any actor. It
holds state and small helpers; decisions are in `admission`, `batching` and `settlement`.
"""

from __future__ import annotations

from collections import deque
from typing import final

from attrs import evolve

from kvlease.pools.controls import Quota
from kvlease.pools.held import PlannedTransfer
from kvlease.pools.unified import UnifiedPool
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.event_base import EventSink
from kvlease.protocols.identity import CacheIdentity
from kvlease.protocols.ports import Clock, ModelRunner
from kvlease.protocols.schema import Schema
from kvlease.runtime.cache_feed import CacheFeed
from kvlease.runtime.counters import Counters
from kvlease.runtime.estimates import Estimates
from kvlease.runtime.figures import Figures
from kvlease.runtime.loader import submit
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.messages import PrefetchResult, StepKind, StepOrder
from kvlease.runtime.replies import Reply
from kvlease.runtime.request import Request
from kvlease.runtime.sequence import Phase, Sequence
from kvlease.runtime.stalls import StallBook
from kvlease.runtime.transfer import Transfer
from kvlease.runtime.transfer_plan import TransferObserver, TransferPlan
from kvlease.units import StepId, TransferId

MAX_ROOTS = 1 << 16
"""Tenants whose prefix tree is remembered; it is a hash, and made again if need be."""
DECODE_AHEAD = 4
"""Tokens that a decode step draws on a device before the host hears of them: a hand-over costs half
a millisecond there, and more of them would be shared by few tokens and seen as bursts."""


@final
class EngineCore:
    """State of one engine, touched only by the scheduler's task (and read for statistics)."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelRunner,
        pool: UnifiedPool,
        sink: EventSink,
        clock: Clock,
        identity: CacheIdentity,
        counters: Counters,
    ) -> None:
        """Start with nothing waiting and nothing running."""
        self.config = config
        self.model = model
        self.pool = pool
        self.sink = sink
        self.clock = clock
        self.identity = identity
        self.root = self.first_root = identity.root()
        self.counters = counters
        self.stalls = StallBook(counters)
        self.figures = Figures()
        arithmetic = config.compute == "model"
        # Without arithmetic, computing again costs nothing and would always win: always load then.
        self.estimates = Estimates(is_choosing=config.load_or_recompute and arithmetic)
        self.chunk_tokens = config.chunk_tokens or (256 if arithmetic else 65536)
        on_kernels = config.device == "cuda" and not config.exact
        self.decode_ahead = config.decode_ahead or (DECODE_AHEAD if on_kernels else 1)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order of admission: the newest, which is preempted first, stands last."""
        self.unsaid: list[Request] = []
        """Those with published tokens that their callers have not got yet."""
        self.steps: dict[StepKind, StepOrder | None] = {"prefill": None, "decode": None}
        self.transfers: dict[PlannedTransfer, Transfer] = {}
        self.planned: dict[TransferId, PlannedTransfer] = {}
        self.transfer_observer: TransferObserver | None = None
        self.loader: Mailbox[Transfer] | None = None
        self._last_step = 0
        self._empty_layers = {
            (spans, tails): empty_layers(pool.schema, spans=spans, tails=tails)
            for spans in (False, True)
            for tails in (False, True)
        }
        self._roots: dict[bytes, bytes] = {}
        self.quotas: dict[bytes, Quota] = {}
        """By salt: what tenants may keep cached."""
        self.prefetches: dict[PlannedTransfer, tuple[Reply[PrefetchResult], PrefetchResult]] = {}
        """Transfers that somebody waits for, with what he is told when they are done."""
        self.feed: CacheFeed | None = None
        if config.cache_events:
            self.feed = CacheFeed(config.cache_events)
            pool.index.tree.observer = self.feed
            self.feed.follow(self.root, identity.tenant_salt)

    def root_of(self, salt: bytes) -> bytes:
        """Return the prefix tree of a tenant's salt under the present weights (R10)."""
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[salt] = evolve(self.identity, tenant_salt=salt).root()
            if self.feed is not None:
                self.feed.follow(root, salt)
        return root

    def renew(self, weights_version: int) -> None:
        """Take other weights: from now on every tenant has a prefix tree of its own anew."""
        self.identity = evolve(self.identity, weights_version=weights_version)
        self._roots.clear()
        self.root = self.root_of(self.identity.tenant_salt)

    @property
    def schema(self) -> Schema:
        """The model's cached state."""
        return self.pool.schema

    def next_step(self) -> StepId:
        """Return a new step id."""
        self._last_step += 1
        return StepId(self._last_step)

    def hand_over(self) -> None:
        """Give callers the tokens that were published for them."""
        now = self.clock.now()
        for request in self.unsaid:
            request.hand_over(now)
        self.unsaid.clear()

    def in_phase(self, phase: Phase) -> list[Sequence]:
        """Running sequences of one phase that are in no step, oldest admission first."""
        return [seq for seq in self.running if seq.phase is phase and not seq.in_step]

    def start_transfer(self, planned: PlannedTransfer) -> None:
        """Hand a planned transfer to the loader, with its deadline and both ends held."""
        plan = TransferPlan(
            id=planned.id,
            kind=planned.kind,
            copies=planned.copies,
            num_layers=self.schema.num_layers,
            deadline_s=self.config.load_timeout_s,
            owner="loader",
            holds=(_Ends(self.pool, planned),),
            empty_layers=self._empty_layers[bool(planned.source), bool(planned.tails)],
        )
        self.planned[planned.id] = planned  # before it is made: its making is told to the log
        transfer = Transfer(plan, clock=self.clock, observer=self.transfer_observer)
        planned.carrier = transfer
        self.transfers[planned] = transfer
        assert self.loader is not None, "the engine connects the loader before it schedules"
        submit(self.loader, transfer)


@final
class _Ends:
    """Both ends of a transfer, let go when it has settled."""

    def __init__(self, pool: UnifiedPool, planned: PlannedTransfer) -> None:
        self._pool = pool
        self._planned = planned

    def close(self) -> None:
        self._pool.transfers.settled(self._planned)


def empty_layers(schema: Schema, *, spans: bool, tails: bool) -> frozenset[int]:
    """Return a transfer's layers without bytes by the schema, not by what happens to be planned."""
    return frozenset(layer.id for layer in schema.layers).difference(
        layer for layer, _ in schema.parts(spans=spans, tails=tails)
    )
