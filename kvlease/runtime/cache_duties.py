"""The scheduler's part of what users ask of the cache: pins, prefetches, evictions, quotas.

Runs inside the scheduler's turn, because nobody else touches the pools; owns no state that a
restart could lose.
"""

import math
from typing import final

from kvlease.errors import PagesUnavailable, TransferFailed
from kvlease.pools.controls import NO_QUOTA
from kvlease.pools.held import PlannedTransfer
from kvlease.protocols.ports import CompletionState
from kvlease.runtime.core import EngineCore
from kvlease.runtime.messages import (
    CacheMessage,
    EvictPrefix,
    EvictResult,
    PinPrefix,
    PinResult,
    Prefetch,
    PrefetchResult,
    SetQuota,
    Unpin,
)
from kvlease.runtime.transfer import Transfer


@final
class CacheDuties:
    """Applies cache messages to a core's pool."""

    def __init__(self, core: EngineCore) -> None:
        """Borrows the core for the life of the engine."""
        self._core = core
        self._controls = core.pool.controls
        self._page_tokens = core.schema.page_tokens
        self.next_expiry_s = -math.inf
        """When the first pin ends; at first unknown, since a predecessor may have left some."""

    def apply(self, message: CacheMessage) -> None:
        """Do what a message asks and answer it, now or when a transfer has ended."""
        core, controls = self._core, self._controls
        self._expire()
        root = core.root_of(message.salt)
        try:
            match message:
                case Prefetch():
                    self._prefetch(message, root)
                case PinPrefix():
                    until_s = core.clock.now() + message.seconds
                    quota = core.quotas.get(message.salt, NO_QUOTA)
                    pin = controls.pin(root, message.prompt, until_s, quota)
                    self.next_expiry_s = min(self.next_expiry_s, until_s)
                    tokens = pin.match.num_pages * self._page_tokens
                    message.done.send(PinResult(pin.id, tokens))
                case Unpin():
                    message.done.send(controls.unpin(message.pin, root))
                case EvictPrefix():
                    out = controls.evict(root, message.prefix, message.tier)
                    message.done.send(EvictResult(out.device, out.host, out.kept))
                case SetQuota():
                    core.quotas[message.salt] = message.quota
                    message.done.send(None)
        except PagesUnavailable as error:
            message.done.fail(error)

    def _prefetch(self, message: Prefetch, root: bytes) -> None:
        core = self._core
        found = self._controls.prefetch(root, message.prompt, message.tier)
        result = PrefetchResult(
            found.pages * self._page_tokens, found.moved_pages * self._page_tokens
        )
        if found.planned is None:
            message.done.send(result)
            return
        core.start_transfer(found.planned)
        core.prefetches[found.planned] = (message.done, result)

    def transfer_ended(self, transfer: Transfer) -> None:
        """Answer a prefetch whose transfer is over."""
        planned: PlannedTransfer | None = self._core.planned.get(transfer.plan.id)
        waiting = None if planned is None else self._core.prefetches.pop(planned, None)
        if waiting is None:
            return
        done, result = waiting
        problem = transfer.problem
        if transfer.state is CompletionState.DONE:
            done.send(result)
        else:
            done.fail(TransferFailed("it was revoked") if problem is None else problem.error())

    def _expire(self) -> None:
        now = self._core.clock.now()
        if now >= self.next_expiry_s:
            next_s = self._controls.expire(now)
            self.next_expiry_s = math.inf if next_s is None else next_s

    def tidy(self) -> None:
        """End pins whose time is up, and bring tenants back within their quotas."""
        self._expire()
        core = self._core
        for salt, quota in core.quotas.items():
            self._controls.keep_quota(core.root_of(salt), quota)
