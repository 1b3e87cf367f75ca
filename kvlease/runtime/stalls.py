"""How long compute really stood still for transfers: the exposed stall.

Told by the compute stream's worker, one wait at a time; taken by the step that waited.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import final

from kvlease.protocols.event_base import Tier
from kvlease.protocols.event_work import Stall
from kvlease.protocols.ports import Completion
from kvlease.protocols.readiness import PendingTransfer
from kvlease.runtime.counters import Counters
from kvlease.runtime.figures import StallTotal
from kvlease.runtime.transfer import LayerCompletion, Transfer


@final
class StallBook:
    """Waits of the compute stream by transfer, until a step takes them; a `WaitObserver`."""

    def __init__(self, counters: Counters) -> None:
        """Borrows the counters; every wait counts there at once."""
        self._counters = counters
        self._waits: defaultdict[Transfer, list[Stall]] = defaultdict(list)
        self._totals: dict[tuple[Tier, int], StallTotal] = {}
        self._lock = threading.Lock()

    def __call__(self, completion: Completion, seconds: float) -> None:
        """Book one wait; called on the stream's worker."""
        with self._lock:
            self._counters.gate_wait_s += seconds
            if isinstance(completion, LayerCompletion):
                transfer = completion.transfer
                wait_us = round(seconds * 1e6)
                self._waits[transfer].append(Stall(transfer.plan.id, completion.layer, wait_us))
                tier: Tier = "host" if transfer.plan.kind == "load" else "device"
                key = tier, completion.layer
                total = self._totals.get(key, StallTotal(0, 0.0))
                self._totals[key] = StallTotal(total.waits + 1, total.seconds + seconds)

    def totals(self) -> dict[tuple[Tier, int], StallTotal]:
        """Return all waits so far by the tier that bytes came from, and layer."""
        with self._lock:
            return dict(self._totals)

    def take(self, transfers: Iterable[PendingTransfer]) -> list[Stall]:
        """Return and forget the waits for these transfers."""
        taken: list[Stall] = []
        with self._lock:
            for transfer in transfers:
                if isinstance(transfer, Transfer):
                    taken += self._waits.pop(transfer, ())
        return taken

    def forget(self, transfer: Transfer) -> None:
        """Drop the waits of a transfer that no step will take."""
        with self._lock:
            self._waits.pop(transfer, None)
