"""Damage to single copies: fail, shorten, corrupt, tell a wrong number of bytes.

`copy_with` does to one order what a plan says of it; `FaultyCopier` does so on the workers of real
streams. Memory is reached through the order's own ``target``, which its lease covers.
"""

from __future__ import annotations

import time
from typing import final

from attrs import frozen

from kvlease.errors import UsageError
from kvlease.protocols.ports import Copier, CopyOrder
from kvlease.runtime.loader import DirectCopier
from kvlease.services.lab.faults import (
    CopyFaults,
    CopyRule,
    Corrupt,
    Delay,
    Fail,
    FaultPlan,
    FewerBytes,
    InjectedFault,
    Injector,
    Shorten,
)

_FLIPPED = bytes(byte ^ 0x55 for byte in range(256))
_ON_THREADS = (Delay, Fail, Shorten, Corrupt, FewerBytes)


@frozen
class Copied:
    """What a copy really moved, and what it says that it moved; in bytes."""

    moved: int
    told: int


def copy_with(faults: CopyFaults, order: CopyOrder, copier: Copier) -> Copied:
    """Execute an order as a plan would have it; raises InjectedFault if it is to fail."""
    if faults.fail is not None:
        raise InjectedFault(faults.fail)
    left_out: list[tuple[memoryview, bytes]] = []
    if Shorten in faults or FewerBytes in faults:
        last = order.target()[-1]
        part = last[len(last) // 2 :]
        left_out.append((part, bytes(part)))
    told = copier.copy(order)
    moved = told
    for part, before in left_out:
        part[:] = before
        moved -= len(before)
    if Corrupt in faults:
        for piece in order.target():
            piece[:] = bytes(piece).translate(_FLIPPED)
    return Copied(moved, moved if Shorten in faults else told)


@final
class FaultyCopier:
    """A copier for real streams; delays sleep on the stream's worker, so they hold what follows."""

    def __init__(self, plan: FaultPlan, copier: Copier | None = None) -> None:
        """Read a plan; raises UsageError when it holds what only a simulated device can do."""
        for rule in plan.rules:
            if not (isinstance(rule, CopyRule) and isinstance(rule.fault, _ON_THREADS)):
                raise UsageError(f"{rule} needs a simulated device; real streams cannot do it")
        self._injector = Injector(plan)
        self._copier = copier or DirectCopier()

    def copy(self, order: CopyOrder) -> int:
        """Execute the order on the calling stream worker; return the bytes it tells of."""
        faults = self._injector.of_copy(order)
        if faults.delay_s:
            time.sleep(faults.delay_s)
        return copy_with(faults, order, self._copier).told
