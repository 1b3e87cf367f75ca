"""One direction of a simulated link: it carries groups of copies in the order of their launch."""

from __future__ import annotations

from typing import final

import trio

from kvlease.runtime.loader import RunCopies
from kvlease.runtime.stream_scope import Work
from kvlease.services.lab.spec import LinkSpec
from kvlease.services.lab.truth import Truth
from kvlease.services.lab.virtual_stream import SimulatedStream


@final
class Link:
    """Carries one group at a time; a group's bytes land together, at the end of its time.

    ``turn`` is held meanwhile; links that share it take turns, in the order in which they asked.
    """

    def __init__(self, name: str, spec: LinkSpec, turn: trio.Lock, truth: Truth) -> None:
        """Make the link and its queue, ``stream``; whoever opened the device runs it."""
        self._spec = spec
        self._turn = turn
        self._truth = truth
        self.stream = SimulatedStream(name, self._perform, accept=self._accept)

    def _accept(self, work: Work) -> Work:
        if isinstance(work, RunCopies) and work.transfer.plan.kind == "load":
            self._truth.asked(work.transfer, work.orders)
        return work

    async def _perform(self, work: Work) -> None:
        if isinstance(work, RunCopies):
            await self._carry(work)
        else:
            work()

    async def _carry(self, group: RunCopies) -> None:
        """Begin the group's copies, take their time, and let them land in their order."""
        transfer = group.transfer
        left = [i for i in range(group.first, group.last) if transfer.begin_copy(i)]
        try:
            if left:
                nbytes = sum(transfer.plan.copies[i].nbytes for i in left)
                async with self._turn:
                    await trio.sleep(self._spec.seconds(nbytes))
            while left:
                self._land(group, left.pop(0))
        finally:
            for index in left:
                transfer.end_copy(index, 0)

    def _land(self, group: RunCopies, index: int) -> None:
        transfer = group.transfer
        order = transfer.plan.copies[index]
        try:
            moved = group.copier.copy(order)
        except Exception as error:
            transfer.end_copy(index, error)
        else:
            self._truth.landed(transfer, order, moved)
            transfer.end_copy(index, moved)
