"""`engine.cache`: what users ask of the cache itself, beside asking for answers.

Each call is a message to the scheduler, which alone touches the pools. ``salt`` names the tenant,
as in `Engine.generate`; nobody reaches another tenant's pages by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, final

from kvlease.errors import ConfigError, PromptError
from kvlease.pools.controls import Quota
from kvlease.protocols.config import MAX_TIMEOUT_S
from kvlease.protocols.rpc import CacheTier
from kvlease.runtime.cache_feed import Channel
from kvlease.runtime.core import EngineCore
from kvlease.runtime.mailbox import Mailbox, ask
from kvlease.runtime.messages import (
    EvictPrefix,
    EvictResult,
    PinPrefix,
    PinResult,
    Prefetch,
    PrefetchResult,
    SchedulerMessage,
    SetQuota,
    Unpin,
)
from kvlease.runtime.replies import Reply

R = TypeVar("R")


@final
class CacheControl:
    """Prefetch, pin, evict, quotas, and what happens to cached pages.

    All calls checkpoint, and raise ActorClosed or ActorBroken when the engine ends first. Prompts
    are int32 bytes.
    """

    def __init__(self, core: EngineCore, scheduler: Mailbox[SchedulerMessage]) -> None:
        """Made by the engine."""
        self._core = core
        self._scheduler = scheduler

    async def prefetch(
        self, prompt: bytes, tier: CacheTier = "device", *, salt: bytes | None = None
    ) -> PrefetchResult:
        """Bring what is cached of a prompt to a tier, and wait until it is there.

        It may be evicted again at once where the tier is short; `pin` keeps it. Raises
        PagesUnavailable without room for it now, TransferFailed when its bytes did not come.
        """
        tokens, whose = self._check(prompt), self._salt(salt)
        return await self._ask("prefetch", lambda done: Prefetch(whose, tokens, tier, done))

    async def pin(self, prompt: bytes, seconds: float, *, salt: bytes | None = None) -> PinResult:
        """Keep what is cached of a prompt from being evicted, on the tiers that have it.

        Raises PagesUnavailable if nothing of it is cached, or if pins hold too much already.
        """
        if not 0 < seconds <= MAX_TIMEOUT_S:
            raise PromptError(
                f"a pin of {seconds} seconds; give seconds above 0, up to {MAX_TIMEOUT_S:.0f}:"
                " every pin has an end"
            )
        tokens, whose = self._check(prompt), self._salt(salt)
        return await self._ask("pin", lambda done: PinPrefix(whose, tokens, seconds, done))

    async def unpin(self, pin: int, *, salt: bytes | None = None) -> bool:
        """End a pin of this tenant's; says whether there was such a pin."""
        whose = self._salt(salt)
        return await self._ask("unpin", lambda done: Unpin(whose, pin, done))

    async def evict(
        self, prefix: bytes, tier: CacheTier | None = None, *, salt: bytes | None = None
    ) -> EvictResult:
        """Let every idle page go whose prefix begins with these tokens, from one tier or both.

        What somebody uses or has pinned stays, and is counted. No tokens at all mean every page of
        the tenant.
        """
        tokens, whose = self._check(prefix), self._salt(salt)
        return await self._ask("evict", lambda done: EvictPrefix(whose, tokens, tier, done))

    async def set_quota(
        self,
        salt: bytes,
        *,
        device_pages: int | None = None,
        host_pages: int | None = None,
    ) -> None:
        """Bound the pages that a tenant may keep cached; over it, its own least used ones go.

        What its running requests use is not taken from them.
        """
        quota = Quota(device_pages, host_pages)

        def make(done: Reply[None]) -> SetQuota:
            return SetQuota(salt, quota, done)

        await self._ask("set quota", make)

    def share(self, tier: CacheTier, *, salt: bytes | None = None) -> int:
        """Count the pages that a tenant has cached on a tier; no checkpoint."""
        return self._core.pool.controls.share(self._core.root_of(self._salt(salt)), tier)

    def changes(self, *, salt: bytes | None = None) -> Channel:
        """Return the channel of what happens to a tenant's pages; no checkpoint.

        Raises ConfigError unless the engine was opened with ``cache_events``.
        """
        if self._core.feed is None:
            raise ConfigError("cache_events is 0; open the engine with more to follow its pages")
        return self._core.feed.channel(self._salt(salt))

    def _salt(self, salt: bytes | None) -> bytes:
        return self._core.config.tenant_salt if salt is None else salt

    @staticmethod
    def _check(prompt: bytes) -> bytes:
        if len(prompt) % 4:
            raise PromptError(f"a prompt of {len(prompt)} bytes is no row of int32 token ids")
        return prompt

    async def _ask(self, what: str, make: Callable[[Reply[R]], SchedulerMessage]) -> R:
        seconds = self._core.config.request_timeout_s
        return await ask(self._scheduler, make, request=what, deadline_s=seconds)
