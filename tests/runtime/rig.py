"""What the runtime's tests share: scripted copies, and cancellation at every checkpoint."""

import threading
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from kvlease.protocols.ports import CopyOrder, CopyPart, CopyParts
from kvlease.runtime.transfer import Transfer
from kvlease.runtime.transfer_plan import Kind, TransferObserver, TransferPlan
from kvlease.units import TransferId

PATIENCE_S = 10.0
"""How long a test may wait for a thread before it is called stuck."""


def order(
    layer: int, component: str, nbytes: int = 8, run: Callable[[], int] | None = None
) -> CopyOrder:
    move = run or (lambda: nbytes)
    parts = CopyParts((CopyPart(layer, component),))
    sizes = partial(list[int], (nbytes,))
    return CopyOrder(TransferId(1), "load", "host", parts, nbytes, move, sizes, list[int], list)


def plan(
    *orders: CopyOrder,
    num_layers: int | None = None,
    transfer_id: int = 1,
    kind: Kind = "load",
    deadline_s: float = 5.0,
    empty: frozenset[int] = frozenset(),
    holds: tuple["Held", ...] = (),
) -> TransferPlan:
    layers = num_layers if num_layers is not None else 1 + max(o.layer for o in orders)
    return TransferPlan(
        TransferId(transfer_id),
        kind,
        orders,
        layers,
        deadline_s,
        "rig",
        holds=holds,
        empty_layers=empty,
    )


def grid(num_layers: int, *components: str) -> tuple[CopyOrder, ...]:
    return tuple(order(layer, name) for layer in range(num_layers) for name in components)


class PlainCopier:
    def copy(self, order: CopyOrder) -> int:
        return order.run()


class Held:
    """A lease stand-in that counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class HoldingCopier:
    """Holds chosen (layer, component) copies until `go`; `entered` says that one is running."""

    def __init__(self, *held: tuple[int, str]) -> None:
        self.held = set(held)
        self.entered = threading.Event()
        self.go = threading.Event()
        self.copied: list[tuple[int, str]] = []

    def copy(self, order: CopyOrder) -> int:
        if (order.layer, order.component) in self.held:
            self.entered.set()
            assert self.go.wait(PATIENCE_S)
        nbytes = order.run()
        self.copied.append((order.layer, order.component))
        return nbytes


class Witness(TransferObserver):
    """Writes down what an observer hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, object]] = []

    def names(self, transfer: int | None = None) -> list[str]:
        return [name for name, its, _ in self.heard if transfer in (None, its)]

    def _note(self, name: str, transfer: Transfer, what: object = None) -> None:
        self.heard.append((name, transfer.plan.id, what))

    def planned(self, transfer: Transfer) -> None:
        self._note("planned", transfer)

    def recorded(self, transfer: Transfer, layers: tuple[int, int]) -> None:
        self._note("recorded", transfer, layers[0])

    def layer_done(self, transfer: Transfer, layers: tuple[int, int], nbytes: int) -> None:
        self._note("layer_done", transfer, (layers[0], nbytes))

    def done(self, transfer: Transfer, nbytes: int) -> None:
        self._note("done", transfer, nbytes)

    def failed(self, transfer: Transfer, reason: str, message: str) -> None:
        self._note("failed", transfer, reason)

    def settled(self, transfer: Transfer) -> None:
        self._note("settled", transfer)


class _CancelAt(trio.abc.Instrument):
    """Cancels a scope when its task is about to take its n-th step."""

    def __init__(self, scope: trio.CancelScope, step: int) -> None:
        self.scope = scope
        self.left = step
        self.task = trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        pass

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


Trial = Callable[[], Awaitable[None]]
Check = Callable[[bool], Awaitable[None] | None]


async def cancel_at_checkpoint(step: int, trial: Trial, check: Check) -> bool:
    """Run ``trial``, cancelled at its ``step``-th checkpoint; return whether it was cancelled."""
    # A trial that waits for ever at an earlier checkpoint is a mistake of the test.
    with trio.fail_after(PATIENCE_S), trio.CancelScope() as scope:
        instrument = _CancelAt(scope, step)
        trio.lowlevel.add_instrument(instrument)
        try:
            await trial()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    outcome = check(scope.cancelled_caught)
    if outcome is not None:
        await outcome
    return scope.cancelled_caught


async def cancel_at_every_checkpoint(trial: Trial, check: Check) -> int:
    """Run ``trial`` again and again, cancelled at its 1st, 2nd, ... checkpoint, then not at all.

    ``check`` hears after each whether the trial was cancelled; returns how many checkpoints were.
    """
    for step in range(1, 200):
        if not await cancel_at_checkpoint(step, trial, check):
            return step - 1
    raise AssertionError("the trial has no end")
