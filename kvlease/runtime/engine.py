"""The engine: the embeddable library's door to everything else.

`open_engine` starts the actors of one engine and ends them with its block; `Engine.generate` is an
async context manager, and leaving it ends the request wherever it is. The engine owns the pools and
the index, so that they outlive any actor.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import final

import attrs
import numpy as np
import trio

from kvlease.errors import EngineFull, KVLeaseError, LedgerImbalance, PromptError, RequestFailed
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.event_base import Tier
from kvlease.protocols.event_pages import PageFlush
from kvlease.protocols.ownership import Lease, Shared
from kvlease.protocols.ports import Completion, ModelRunner
from kvlease.runtime.assembly import Assembly, EnginePorts, assemble, run_services
from kvlease.runtime.cache_control import CacheControl
from kvlease.runtime.completions import CompletionBase
from kvlease.runtime.core import EngineCore
from kvlease.runtime.counters import Statistics
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.figures import Figures, StallTotal
from kvlease.runtime.mailbox import ask
from kvlease.runtime.messages import Flush
from kvlease.runtime.nurseries import one_error
from kvlease.runtime.request import GenerateResult, Listener, Request, TokenEvent
from kvlease.runtime.wake import TrioWaker
from kvlease.units import RequestId

Prompt = Sequence[int] | bytes
"""Token ids, or the same as int32 little-endian bytes."""


@final
class AnswerStream:
    """The tokens of one answer as they are published; iterate once.

    Ownership: borrowed from `Engine.generate` for its block.
    """

    def __init__(self, request: Request) -> None:
        """Made by the engine."""
        self.request = request
        self._ready: Iterator[TokenEvent] = iter(())

    def __aiter__(self) -> AnswerStream:
        """Iterate over the tokens, once; leaving the loop early is fine."""
        return self

    async def __anext__(self) -> TokenEvent:
        """Return the next token; raises what ended the request early, after its last token.

        Checkpoints: only if it waits.
        """
        for event in self._ready:
            return event
        try:
            self._ready = iter(await self.request.inbox.receive())
        except trio.EndOfChannel:
            await self.request.ended.wait()
            if self.request.error is not None:
                raise self.request.error from None
            raise StopAsyncIteration from None
        return next(self._ready)

    @property
    def result(self) -> GenerateResult:
        """How the request ended; raises RequestFailed while it has not."""
        if self.request.result is None:
            raise RequestFailed(f"request {self.request.id} has not ended; read its tokens first")
        return self.request.result

    async def ended(self) -> KVLeaseError | None:
        """Wait until the answer is complete; returns what ended it early, None if nothing did.

        For those whose tokens go to a listener. Checkpoints: only if it waits.
        """
        await self.request.ended.wait()
        return self.request.error

    async def drain(self) -> GenerateResult:
        """Read all tokens and return the result; raises as iteration does."""
        async for _ in self:
            pass
        return self.result


@final
class Engine:
    """One model, one set of pools, and the actors that serve requests from them."""

    def __init__(self, assembly: Assembly) -> None:
        """Made by `open_engine`."""
        self._assembly = assembly
        self._core: EngineCore = assembly.core
        self._last_request = 0
        self.cache = CacheControl(assembly.core, assembly.scheduler)
        """Prefetch, pin, evict, quotas, and what happens to cached pages."""

    @property
    def config(self) -> EngineConfig:
        """The configuration the engine was opened with."""
        return self._core.config

    @property
    def model(self) -> ModelRunner:
        """The model being served: vocabulary, schema, limits."""
        return self._core.model

    @property
    def model_name(self) -> str:
        """What the model is called in logs and reports."""
        return self._assembly.model_name

    @asynccontextmanager
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: bytes | None = None,
        timeout_s: float | None = None,
        listener: Listener | None = None,
    ) -> AsyncGenerator[AnswerStream]:
        """Answer a prompt, streaming; leaving the block ends the request and frees its pages.

        Args:
            prompt: token ids, or the same as int32 bytes.
            params: how the answer is drawn.
            salt: the tenant's; requests of different salts share no page (the configured one).
            timeout_s: seconds until it ends as late, if sooner than ``request_timeout_s``.
            listener: is handed the tokens in the stream's stead, without a task of their own.

        Checkpoints: on leaving, if the request has not ended by itself. Raises PromptError for a
        prompt that can never be served, EngineFull (with retry advice) when the queue is full.
        """
        request = self._make_request(prompt, params or SamplingParams(), salt, timeout_s)
        request.listener = listener
        async with self._served(request) as stream:
            yield stream

    @asynccontextmanager
    async def fork(
        self, parent: AnswerStream, params: SamplingParams | None = None
    ) -> AsyncGenerator[AnswerStream]:
        """Continue a running answer on a second branch, sharing its sealed pages.

        The branch starts from the parent's prompt and the tokens it has published so far; as
        `generate` otherwise.
        """
        tokens = parent.request.prompt_tokens()
        tokens.extend(event.token for event in parent.request.output)
        request = self._make_request(
            tokens.tobytes(), params or parent.request.params, parent.request.salt
        )
        request.parent = parent.request.id
        async with self._served(request) as stream:
            yield stream

    @asynccontextmanager
    async def _served(self, request: Request) -> AsyncGenerator[AnswerStream]:
        self._assembly.submit(request)
        try:
            yield AnswerStream(request)
        finally:
            request.inbox.close()
            if not request.ended.is_set():
                self._assembly.cancel(request)
                with trio.CancelScope(shield=True):
                    await request.ended.wait()
            self._assembly.open_requests.pop(request, None)

    def _make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        salt: bytes | None,
        timeout_s: float | None = None,
    ) -> Request:
        core = self._core
        tokens = _as_bytes(prompt)
        _check_prompt(tokens, params, core)
        queued = self._assembly.num_queued()
        if queued >= core.config.max_queue:
            core.counters.rejected += 1
            retry_s = self.retry_after_s()
            raise EngineFull(
                f"{queued} requests are waiting, as many as may (max_queue);"
                f" try again in {retry_s:.1f} s",
                retry_s,
            )
        self._last_request += 1
        now = core.clock.now()
        limit_s = core.config.request_timeout_s
        if timeout_s is not None:
            limit_s = min(limit_s, timeout_s)
        return Request(
            id=RequestId(self._last_request),
            prompt=tokens,
            params=params,
            submitted_s=now,
            deadline_s=now + limit_s,
            salt=core.config.tenant_salt if salt is None else salt,
        )

    def retry_after_s(self) -> float:
        """Return after how many seconds the queue should have moved on, as advice to clients."""
        core = self._core
        return core.estimates.queue_s(self._assembly.num_queued(), core.config.max_sessions)

    def lease_prefix(self, prompt: Prompt, salt: bytes | None = None) -> Lease[Shared]:
        """Lease the cached pages of a prompt that are on the device, for readers of your own.

        Returns a lease to use in a ``with`` block: index it with a layer of ``model.schema`` and
        resolve. It pins the pages and may hold none. ``salt`` as in `generate`. No checkpoint.
        """
        core = self._core
        root = core.root if salt is None else core.root_of(salt)
        return core.pool.lease_prefix(root, _as_bytes(prompt), self._lease_closed)

    def _lease_closed(self, last_uses: tuple[Completion, ...]) -> None:
        """Tell the scheduler as the reader's last uses end: its pages may be wanted."""
        tell, waker = self._assembly.pages_given_back, TrioWaker.current()
        for last_use in last_uses:
            if isinstance(last_use, CompletionBase):
                last_use.on_final(lambda: waker.post(tell))
        tell()

    async def flush(self) -> None:
        """Forget everything cached, because the weights changed; running answers go on.

        Requests that come later share nothing with earlier ones. Checkpoints: always. Raises
        ActorClosed or ActorBroken when the engine ends first.
        """
        core = self._core
        core.renew(core.identity.weights_version + 1)
        if core.sink.normal:
            core.sink.emit(PageFlush(identity=core.root.hex()))
        await ask(
            self._assembly.scheduler,
            Flush,
            request="flush",
            deadline_s=core.config.request_timeout_s,
        )

    @property
    def figures(self) -> Figures:
        """Totals by kind, which go on growing; for reading only."""
        return self._core.figures

    def stalls(self) -> dict[tuple[Tier, int], StallTotal]:
        """Return how compute stood still, by the tier that it waited for, and layer."""
        return self._core.stalls.totals()

    def num_overdue(self) -> int:
        """Count requests that are open after their deadline; more than a moment long, they hang."""
        now = self._core.clock.now()
        return sum(request.deadline_s < now for request in self._assembly.open_requests)

    def statistics(self, *, recount: bool = True) -> Statistics:
        """Return counters and ledgers now.

        ``recount`` counts every pool against its holders page by page (R11); without it the
        ledger's columns only have to add up, which takes no time.
        """
        core = self._core
        error: str | None = None
        held = [seq.held for seq in core.running if seq.held is not None]
        slots = [keep.tail_slot for step in core.steps.values() if step for keep in step.keeps]
        try:
            if recount:
                core.pool.check(held, slots)
        except LedgerImbalance as imbalance:
            error = str(imbalance)
        ledgers = core.pool.ledgers()
        return Statistics(
            counters=attrs.evolve(core.counters),
            waiting=len(core.waiting),
            running=len(core.running),
            device=ledgers["device pages"],
            host=ledgers["host pages"],
            device_tails=ledgers["device tails"],
            host_tails=ledgers["host tails"],
            slots=ledgers["sequence slots"],
            ledger_ok=error is None and all(one.is_balanced for one in ledgers.values()),
            ledger_error=error,
        )


@asynccontextmanager
async def open_engine(
    model: str | Path | ModelRunner | None = None,
    config: EngineConfig | None = None,
    *,
    log: EventLog | None = None,
    ports: EnginePorts | None = None,
) -> AsyncGenerator[Engine]:
    """Open an engine for a block: a checkpoint folder, a runner of your own, or the embedded model.

    ``log`` is written by the engine and closed by the caller; ``ports`` replace the outside world
    in tests. Checkpoints: on entry (loading runs in a thread) and on exit. Raises ModelLoadError
    and ConfigError before anything is started.
    """
    assembly = await assemble(model, config or EngineConfig(), log, ports or EnginePorts())
    with one_error():
        async with run_services(assembly):
            yield Engine(assembly)


def _as_bytes(prompt: Prompt) -> bytes:
    if isinstance(prompt, bytes):
        if len(prompt) % 4:
            raise PromptError(f"a prompt of {len(prompt)} bytes is no row of int32 token ids")
        return prompt
    try:
        return array("i", prompt).tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise PromptError(f"a prompt must hold token ids that fit int32: {error}") from error


def _check_prompt(prompt: bytes, params: SamplingParams, core: EngineCore) -> None:
    """Refuse what can never be served, in one sentence."""
    num_tokens, model = len(prompt) // 4, core.model
    if num_tokens == 0:
        raise PromptError("the prompt is empty; give at least one token")
    tokens = np.frombuffer(prompt, dtype=np.int32)
    outside = (tokens < 0) | (tokens >= model.vocab_size)
    if outside.any():
        position = int(outside.argmax())
        raise PromptError(
            f"token {tokens[position]} at position {position} is outside the vocabulary"
            f" (0 to {model.vocab_size - 1})"
        )
    for stop in params.stop_tokens:
        if not 0 <= stop < model.vocab_size:
            raise PromptError(
                f"stop token {stop} is outside the vocabulary (0 to {model.vocab_size - 1})"
            )
    total = num_tokens + params.max_tokens
    if total > model.max_positions:
        raise PromptError(
            f"{num_tokens} prompt tokens and max_tokens {params.max_tokens} make {total}, over the"
            f" model's {model.max_positions} positions"
        )
    page_tokens = core.schema.page_tokens
    pages = -(-total // page_tokens)
    if pages > core.config.device_pages:
        raise PromptError(
            f"{total} tokens need {pages} pages of {page_tokens}, but the pool has"
            f" {core.config.device_pages} (device_pages); it can never hold them"
        )
