"""The step worker: runs one batch after another through the model on the compute stream.

The prefill task and the decode task are two of these, so that a prefill that waits for a transfer
never keeps decode from being planned. A worker knows nothing of queues or pages; it reports every
step exactly once, and only after the step's device work has ended.
"""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import final

import trio

from kvlease.errors import ActorClosed, InternalError, PageMismatch, TransferFailed, UsageError
from kvlease.pools.audit import Audit, Taking
from kvlease.pools.unified import UnifiedPool
from kvlease.protocols.checks import PageCheck
from kvlease.protocols.ports import ModelRunner, SampledToken, Stream
from kvlease.runtime.actor import Actor, Inbox
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.messages import SchedulerMessage, StepEnded, StepOrder

Tokens = tuple[tuple[SampledToken, ...], ...]


@final
class StepWorker(Actor[StepOrder]):
    """Actor that turns step orders into step results; takes each order's step lease."""

    def __init__(
        self,
        mailbox: Inbox[StepOrder],
        scheduler: Mailbox[SchedulerMessage],
        model: ModelRunner,
        pool: UnifiedPool,
        stream: Stream,
    ) -> None:
        """Borrows everything for the life of the engine."""
        super().__init__(mailbox)
        self._scheduler = scheduler
        self._model = model
        self._pool = pool
        self._stream = stream

    async def run(self) -> None:
        """Serve orders until the mailbox closes.

        An error other than a failed transfer is reported and then raised to the supervisor.
        """
        async for order in self.mailbox:
            scope = self._stream  # until the order has a scope of its own
            try:
                scope = self._stream.scope()
                tokens = await self._forward(order, scope)
            except TransferFailed as error:
                await self._discard(order, scope, error)
                if isinstance(error.__cause__, UsageError | InternalError):
                    raise error.__cause__ from error  # the code is wrong: no retry would mend it
            except BaseException as error:
                reported = error if isinstance(error, Exception) else None
                await self._discard(order, scope, reported)
                raise
            else:
                order.lease.close()
                self._scheduler.send_nowait(StepEnded(order, tokens, None))

    async def _forward(self, order: StepOrder, scope: Stream) -> Tokens:
        result = await self._model.forward(order.inputs, order.lease, scope)
        if order.keeps:
            keeps = [
                (order.members[k.member].require_held().lease.slot, k.tail_slot, k.boundary)
                for k in order.keeps
            ]
            scope.launch(partial(self._pool.keep_tails, keeps))
        record = scope.record()
        await record.wait_recorded()
        order.launched()
        await record.wait_done()
        await order.lease.verify()
        _conclude(order.lease.checks)
        tokens = tuple(tuple(drawn) for drawn in result.tokens())
        if self._pool.audit is not None:
            await self._take_sums(order, tokens, self._pool.audit, scope)
        return tokens

    async def _take_sums(
        self, order: StepOrder, tokens: Tokens, audit: Audit, scope: Stream
    ) -> None:
        """Sum the sampled pages that the step has completed, while it still holds them.

        Which pages are sampled is known by their tokens, and so only now.
        """
        keeps = {keep.member: (keep.boundary, keep.tail_slot) for keep in order.keeps}
        takings: list[Taking] = []
        for member, (seq, drawn) in enumerate(zip(order.members, tokens, strict=True)):
            held = seq.require_held()
            assert held.trail is not None, "admission begins a trail where pages are audited"
            computed = seq.tokens[: seq.num_computed + len(order.inputs.sequences[member].tokens)]
            computed.extend(one.token for one in drawn[:-1])
            taking = audit.after_step(held.trail, held.lease, computed, keeps.get(member))
            if taking is not None:
                scope.launch(taking)
                takings.append(taking)
        if takings:
            await scope.record().wait_done()
            for taking in takings:
                taking.finish()

    async def _discard(self, order: StepOrder, scope: Stream, error: Exception | None) -> None:
        """Report a step that publishes nothing, once its launched work has really ended."""
        with trio.CancelScope(shield=True):
            # A failure here is the scope's own: its work was skipped or has raised. A stream that
            # is closed has nothing of the step under way any more.
            with suppress(TransferFailed, ActorClosed):
                await scope.record().wait_done()
            order.lease.close()
            self._scheduler.send_nowait(StepEnded(order, None, error))


def _conclude(checks: Iterable[PageCheck]) -> None:
    """Compare what could not be compared on the stream; raises TransferFailed, as a scope does."""
    try:
        for check in checks:
            check.conclude()
    except PageMismatch as error:
        raise TransferFailed(str(error), "failed") from error
