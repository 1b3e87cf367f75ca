"""One direction of a simulated link: it carries groups of copies in the order of their launch.

One group is carried at a time, and its bytes land together at the end of its time. Whoever waits
for a copy waits for all that was launched before it. Copies within the device keep their place in
that order and take no time.

A copy that was called done when it was launched travels too, at the link's speed, and what really
has to wait waits for it. But nobody waits for *it*: when its group's turn comes the rest of the
group goes, and it gives way, once, to all that is queued by then. So the time between the lie and
the bytes is the link's backlog and the bytes' own time: it grows with the number of sessions that
restore at once, and with the size of a row.
"""

from __future__ import annotations

from typing import final

import trio
from attrs import frozen

from kvlease.runtime.loader import RunCopies
from kvlease.runtime.stream_scope import Work
from kvlease.services.lab.damage import copy_with
from kvlease.services.lab.faults import (
    CopyFaults,
    DoneEarly,
    Drop,
    InjectedFault,
    Injector,
    NeverDone,
    RecordedLate,
    Reorder,
)
from kvlease.services.lab.timing import Timing
from kvlease.services.lab.truth import Truth
from kvlease.services.lab.virtual_stream import SimulatedStream


@frozen(eq=False)
class _Part:
    """One copy of a group, and what goes wrong with it."""

    index: int
    nbytes: int
    faults: CopyFaults


@frozen(eq=False)
class _Group:
    """Copies on their way; ``is_told`` if they were called done at their launch."""

    work: RunCopies
    parts: list[_Part]
    is_told: bool = False

    def __call__(self) -> None:
        """Not for running without time."""
        raise AssertionError("a group is carried by its link")


@final
class Link:
    """Carries one group at a time.

    ``turn`` is held meanwhile; links that share it take turns, in the order in which they asked.
    """

    def __init__(
        self, name: str, timing: Timing, turn: trio.Lock, truth: Truth, injector: Injector
    ) -> None:
        """Make the link and its queue, ``stream``; whoever opened the device runs it."""
        self.stream = SimulatedStream(name, self._perform, accept=self._accept)
        self._timing = timing
        self._turn = turn
        self._truth = truth
        self._injector = injector
        self._never_ended: list[tuple[RunCopies, int]] = []

    def close(self) -> None:
        """The device stops: copies that were never called done return now."""
        for work, index in self._never_ended:
            work.transfer.end_copy(index, InjectedFault("the device was closed"))
        self._never_ended.clear()

    def _accept(self, work: Work) -> Work:
        """See a group at its launch: tell of it, and tell the lies that are told at once."""
        if not isinstance(work, RunCopies):
            return work
        self._injector.at_work("loader")
        if work.transfer.plan.kind == "load":
            self._truth.asked(work.transfer, work.orders)
        group = _Group(work, self._parts(work))
        for part in group.parts:
            if RecordedLate in part.faults:
                self._truth.unheld.add((work.transfer, work.transfer.plan.copies[part.index].layer))
            if DoneEarly in part.faults and work.transfer.begin_copy(part.index):
                work.transfer.end_copy(part.index, part.nbytes)
        return group

    def _parts(self, work: RunCopies) -> list[_Part]:
        parts = [
            _Part(index, order.nbytes, self._injector.of_copy(order))
            for index, order in enumerate(work.orders, work.first)
        ]
        if any(Reorder in part.faults for part in parts):
            layer = work.orders[0].layer
            order = self._injector.shuffled(work.transfer.plan.id, layer, len(parts))
            parts = [parts[place] for place in order]
        return parts

    async def _perform(self, work: Work) -> None:
        if not isinstance(work, _Group):
            work()
        elif work.is_told:
            await self._take_time(work, work.parts)
            for part in work.parts:
                self._land(work, part)
        else:
            await self._carry(work)

    async def _take_time(self, group: _Group, parts: list[_Part]) -> None:
        """Take the time of what crosses the link; a load's copies within the device take none."""
        transfer, layer = group.work.transfer, group.work.orders[-1].last_layer
        orders = [transfer.plan.copies[part.index] for part in parts]
        crossing = [order for order in orders if (order.kind, order.source) != ("load", "device")]
        async with self._turn:
            seconds = self._timing.copies_s(transfer, layer, sum(one.nbytes for one in crossing))
            await trio.sleep(seconds + sum(part.faults.delay_s for part in parts))

    async def _carry(self, group: _Group) -> None:
        """Begin the group's copies, take their time, and let them land in their order."""
        transfer = group.work.transfer
        told = [part for part in group.parts if DoneEarly in part.faults]
        left = [
            part
            for part in group.parts
            if not (DoneEarly in part.faults or Drop in part.faults)
            and transfer.begin_copy(part.index)
        ]
        try:
            if left:
                await self._take_time(group, left)
            while left:
                self._arrive(group, left.pop(0))
        finally:
            for part in left:
                transfer.end_copy(part.index, InjectedFault("the link was closed"))
            if told:
                self.stream.add(_Group(group.work, told, is_told=True))

    def _arrive(self, group: _Group, part: _Part) -> None:
        """Let an honest copy land, and its completion say what it will."""
        transfer = group.work.transfer
        try:
            told = self._land(group, part)
        except Exception as error:
            transfer.end_copy(part.index, error)
            return
        if NeverDone in part.faults:
            self._never_ended.append((group.work, part.index))
        else:
            transfer.end_copy(part.index, told)

    def _land(self, group: _Group, part: _Part) -> int:
        """Move the bytes; return how many the copy tells of."""
        work = group.work
        order = work.transfer.plan.copies[part.index]
        copied = copy_with(part.faults, order, work.copier)
        self._truth.landed(work.transfer, order, copied.moved)
        return copied.told
