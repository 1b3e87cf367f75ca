"""The HiCache loader: the actor that carries transfers out, layer by layer, and ends each of them.

Loads and stores have a stream each, so that no load waits behind a store. This module does not
know what a page is, who planned the transfer, or what its readers do when it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

import trio
from attrs import define, frozen

from kvlease.errors import (
    ActorBroken,
    ActorClosed,
    InternalError,
    OperatingError,
    TransferFailed,
    UsageError,
)
from kvlease.protocols.ports import (
    Completion,
    CompletionState,
    Copier,
    CopyOrder,
    DevicePoint,
    Stream,
)
from kvlease.runtime.actor import Actor, Inbox
from kvlease.runtime.completions import CompletionBase
from kvlease.runtime.mailbox import Mailbox
from kvlease.runtime.nurseries import open_flat_nursery
from kvlease.runtime.stream_scope import CopyWork
from kvlease.runtime.transfer import Transfer
from kvlease.runtime.wake import TrioWaker

Report = Callable[[Transfer], None]
"""Called on the Trio thread; must not wait."""


@final
class DirectCopier:
    """Runs the order as it is; the copier when no faults are injected."""

    __slots__ = ()

    def copy(self, order: CopyOrder) -> int:
        """Move the order's bytes on the calling stream worker."""
        return order.run()


@frozen(eq=False)
class RunCopies(CopyWork):
    """A stream's work: the copies ``first`` to ``last - 1`` of a transfer's plan, in order.

    They are all copies of ``layers``. Where launching is what orders them, they are in order as
    soon as they are queued: ``queued`` takes the layers of all works of the transfer, for whoever
    launches them to record together.

    A stream may look at what it is asked to move before it runs it.
    """

    transfer: Transfer
    first: int
    last: int
    copier: Copier
    layers: tuple[int, ...]
    queued: list[int]

    @property
    def orders(self) -> tuple[CopyOrder, ...]:
        """The orders that will be copied."""
        return self.transfer.plan.copies[self.first : self.last]

    def __call__(self) -> None:
        """Copy on the calling stream worker; what goes wrong ends the transfer."""
        for index in range(self.first, self.last):
            self.transfer.run_copy(index, self.copier)

    def begin(self) -> Callable[[BaseException | None], None]:
        """Give the copies to the device; one that it refuses ends the transfer."""
        begun: dict[int, int | BaseException] = {}
        for index in range(self.first, self.last):
            if self.transfer.begin_copy(index, on_device=True):
                try:
                    begun[index] = self.copier.copy(self.transfer.plan.copies[index])
                except BaseException as error:
                    begun[index] = error
                    self.transfer.fail_copy(index, error)
        return partial(self._ended, begun)

    def _ended(self, begun: dict[int, int | BaseException], error: BaseException | None) -> None:
        for index, moved in begun.items():
            self.transfer.end_copy(index, moved if error is None else error)

    def recorded(self, point: DevicePoint | None) -> None:
        """Say of the layers that readers may order a stream behind them from now on."""
        if point is None:
            self.queued.extend(self.layers)
        else:
            self.transfer.record_layers(self.layers, point)


@define
class _Counters:
    in_flight: int = 0
    unsettled: int = 0
    done: int = 0
    failed: int = 0
    late: int = 0
    revoked: int = 0
    bytes_done: int = 0


@frozen
class LoaderStatistics:
    """What a loader has done so far.

    Attributes:
        in_flight: transfers taken and not ended. unsettled: transfers whose copies may still run.
        failed: transfers that ended badly; ``late`` and ``revoked`` say how many of them were so.
    """

    in_flight: int
    unsettled: int
    done: int
    failed: int
    late: int
    revoked: int
    bytes_done: int


def revoke_unread(transfer: Transfer) -> None:
    """End a transfer that no loader will take, and let its leases go; tells nobody.

    Nothing of it has begun, so it settles with its end.
    """
    transfer.revoke(f"{transfer.name} was revoked: no loader is left to carry it out")
    transfer.release()


def loader_mailbox(
    capacity: int, on_end: Report, on_settled: Report, *, name: str = "loader"
) -> Mailbox[Transfer]:
    """Make a loader's mailbox; transfers that no loader will take are ended and reported by it."""

    def dispose(transfer: Transfer) -> None:
        transfer.revoke(f"{transfer.name} was revoked: no {name} is left to carry it out")
        on_end(transfer)
        transfer.release()
        on_settled(transfer)

    return Mailbox(name, capacity, dispose=dispose)


def submit(mailbox: Mailbox[Transfer], transfer: Transfer) -> bool:
    """Hand a transfer to the loader; never waits.

    Returns False when the loader cannot take it (full, closed, broken): the transfer then ends
    REVOKED and is reported, and its readers go on to recompute.
    """
    try:
        mailbox.send_nowait(transfer)
    except OperatingError:
        mailbox.dispose(transfer)
        return False
    return True


@final
class Loader(Actor[Transfer]):
    """Takes transfers from its mailbox and brings each to its end, however it ends.

    Ownership: takes the transfer with its message and releases its leases once it has settled.
    Reports the end of each transfer once, then its settling once, on the Trio thread.
    """

    def __init__(
        self,
        mailbox: Inbox[Transfer],
        *,
        load_stream: Stream,
        store_stream: Stream,
        on_end: Report,
        on_settled: Report,
        copier: Copier | None = None,
        settle_timeout_s: float = 5.0,
    ) -> None:
        """Borrow the streams; they outlive the loader.

        Args:
            mailbox: made by `loader_mailbox` with the same reports.
            load_stream: carries loads; nothing else should go there.
            store_stream: carries stores and tails.
            on_end: hears of each transfer once it is DONE, FAILED or REVOKED.
            on_settled: hears of each transfer after its leases were released.
            copier: executes the orders; faults are injected by wrapping it.
            settle_timeout_s: how long a loader that is stopped waits for running copies. Those
                that take longer settle by themselves, whenever they return.
        """
        super().__init__(mailbox)
        self._load_stream = load_stream
        self._store_stream = store_stream
        self._on_end = on_end
        self._on_settled = on_settled
        self._copier = copier or DirectCopier()
        self._settle_timeout_s = settle_timeout_s
        self._counters = _Counters()

    def statistics(self) -> LoaderStatistics:
        """Return a snapshot."""
        c = self._counters
        return LoaderStatistics(
            c.in_flight, c.unsettled, c.done, c.failed, c.late, c.revoked, c.bytes_done
        )

    async def run(self) -> None:
        """Carry out transfers until the mailbox is closed, and then those in flight.

        Checkpoints: always. If cancelled, or if anything here fails, every unfinished transfer ends
        REVOKED, is reported, and settles; nobody waits for it for ever. Raises InternalError or
        UsageError when a copy or an observer did: a restart would only hide that.
        """
        async with open_flat_nursery() as nursery:
            async for first in self.mailbox:
                batch = self._next_batch(first)
                # All are entrusted to a task before anything can go wrong with one of them.
                for transfer in batch:
                    self._counters.in_flight += 1
                    self._counters.unsettled += 1
                    nursery.start_soon(self._carry, transfer, name=transfer.name)
                for transfer in batch:
                    # Launching here, not in the tasks, keeps the order of the mailbox.
                    if not transfer.plan.after:
                        self._launch(transfer)

    def _next_batch(self, first: Transfer) -> list[Transfer]:
        """Take all that waits, loads before the rest: somebody waits for a load."""
        batch = [first]
        try:
            while True:
                batch.append(self.mailbox.receive_nowait())
        except (trio.WouldBlock, ActorClosed, ActorBroken):
            pass
        return sorted(batch, key=lambda transfer: transfer.plan.kind != "load")

    def _launch(self, transfer: Transfer) -> None:
        """Put all copies of a transfer on its stream, and record each layer behind its copies.

        A load goes layer by layer, because its readers do. Nobody reads a store before its end, so
        it is one piece of work.
        """
        if transfer.state.is_final or transfer.remaining_s <= 0:
            return  # over, or about to be called late: no use in moving bytes
        is_load = transfer.plan.kind == "load"
        stream = (self._load_stream if is_load else self._store_stream).scope()
        moved = [joint for joint in transfer.plan.layout.joints if joint.first < joint.stop]
        queued: list[int] = []
        try:
            for group in [[joint] for joint in moved] if is_load else [moved]:
                first, last = group[0].first, group[-1].stop
                ids = tuple([joint.layers[0] for joint in group])
                stream.launch(RunCopies(transfer, first, last, self._copier, ids, queued))
            transfer.record_layers(queued)
            _fail_if_skipped(transfer, stream.record())
        except ActorClosed as error:
            transfer.fail(error)

    async def _carry(self, transfer: Transfer) -> None:
        """See one transfer through; whatever happens it ends, is reported, and settles."""
        try:
            await self._see_to_its_end(transfer)
        finally:
            # Does nothing if it has ended; otherwise the loader is being stopped.
            transfer.revoke(f"{transfer.name} was revoked: its loader was stopped")
            try:
                self._report_end(transfer)
            finally:
                await self._see_it_settled(transfer)
        _raise_if_code_is_wrong(transfer)

    async def _see_to_its_end(self, transfer: Transfer) -> None:
        plan = transfer.plan
        with trio.move_on_after(max(0.0, transfer.remaining_s)) as scope:
            if plan.after and await self._done_before(transfer):
                self._launch(transfer)
            await transfer.wait_final()
        if scope.cancelled_caught:
            transfer.fail(
                f"{transfer.name}: {plan.owner} allowed {plan.deadline_s:g} s, by then"
                f" {transfer.bytes_done} of {plan.nbytes} bytes had arrived",
                reason="late",
            )

    async def _done_before(self, transfer: Transfer) -> bool:
        """Wait for what must come before the first copy; False if it will not come.

        Waiting here and not on the stream leaves the stream to other transfers meanwhile.
        """
        try:
            for completion in transfer.plan.after:
                await completion.wait_done()
        except TransferFailed as error:
            transfer.fail(error)
            return False
        return True

    def _report_end(self, transfer: Transfer) -> None:
        counters = self._counters
        counters.in_flight -= 1
        counters.bytes_done += transfer.bytes_done
        if transfer.state is CompletionState.DONE:
            counters.done += 1
        else:
            counters.failed += 1
            reason = "" if transfer.problem is None else transfer.problem.reason
            counters.late += reason == "late"
            counters.revoked += reason == "revoked"
        self._on_end(transfer)

    async def _see_it_settled(self, transfer: Transfer) -> None:
        if transfer.is_settled:
            self._report_settled(transfer)
            return
        try:
            await transfer.wait_settled()
        finally:
            # Cancelled with a copy still running: give it a while, then let it settle by itself.
            with trio.move_on_after(self._settle_timeout_s, shield=True):
                await transfer.wait_settled()
            waker = TrioWaker.current()
            report = partial(self._report_settled, transfer)
            if not transfer.on_settled(partial(waker.post, report)):
                report()

    def _report_settled(self, transfer: Transfer) -> None:
        self._counters.unsettled -= 1
        try:
            transfer.release()
        finally:
            self._on_settled(transfer)


def _fail_if_skipped(transfer: Transfer, end: Completion) -> None:
    """End the transfer if its stream ends without having run the copies (it was abandoned)."""
    if not isinstance(end, CompletionBase):
        return  # a stream of another kind; the deadline stands

    def check() -> None:
        if end.problem is not None:
            transfer.fail(end.problem.message, end.problem.reason)

    if not end.on_final(check):
        check()


def _raise_if_code_is_wrong(transfer: Transfer) -> None:
    """Bring down the loader for what a restart would only hide."""
    if transfer.observer_error is not None:
        raise InternalError(
            f"an observer of {transfer.name} failed; the log may lack its events"
        ) from transfer.observer_error
    cause = None if transfer.problem is None else transfer.problem.cause
    if isinstance(cause, UsageError | InternalError | AssertionError):
        raise cause
