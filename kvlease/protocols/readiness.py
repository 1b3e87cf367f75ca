"""Whether a layer can be read yet: the transfers still filling it, and what was opened when.

Leases ask this module before they open anything; it knows no page and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, final

from kvlease.errors import NotReady
from kvlease.protocols.ports import Completion, CompletionState, Stream
from kvlease.units import NO_STEP, LayerId, LeaseId, StepId


class PendingTransfer(Protocol):
    """A transfer as its readers see it: one completion per layer."""

    def layer_completion(self, layer: LayerId) -> Completion:
        """Return the completion of one layer, all its components together."""
        ...

    @property
    def name(self) -> str:
        """What to call the transfer in an error."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether everything planned has arrived."""
        ...


class GateObserver(Protocol):
    """Hears of the waits that readers really did, for the log and the exposed-stall figure."""

    def waited(
        self, leases: Sequence[LeaseId], step: StepId, layer: LayerId, transfer: PendingTransfer
    ) -> None:
        """Readers were made to wait for one layer of a transfer; ``step`` is 0 outside steps."""
        ...


class Readiness:
    """Which layers of a set of pages can be read, given the transfers still filling them.

    One word decides the common case: layers below ``ready_through`` need no wait. What a stream was
    made to wait for is kept in ``bound`` until it is known to be done (R2).
    """

    __slots__ = ("_observer", "_pending", "_step", "bound", "ready_through")

    def __init__(
        self,
        num_layers: int,
        pending: Iterable[tuple[LeaseId, PendingTransfer]] = (),
        observer: GateObserver | None = None,
        step: StepId = NO_STEP,
    ) -> None:
        """Start with nothing ready if anything is pending, and all ready otherwise.

        ``pending`` pairs each reader's lease with a transfer it depends on.
        """
        self._pending: dict[PendingTransfer, list[LeaseId]] = {}
        for lease, transfer in pending:
            self._pending.setdefault(transfer, []).append(lease)
        self._observer = observer
        self._step = step
        self.bound: list[Completion] = []
        self.ready_through = 0 if self._pending else num_layers

    @property
    def pending(self) -> Collection[PendingTransfer]:
        """The transfers that were filling the pages when this was made."""
        return self._pending.keys()

    def check(self, layer: LayerId) -> None:
        """Raise NotReady unless every completion of the layer is DONE."""
        for transfer in self._pending:
            state = transfer.layer_completion(layer).state
            if state is not CompletionState.DONE:
                raise NotReady(
                    f"layer {layer} is still being filled by {transfer.name}"
                    f" ({state.value}); await resolve() instead"
                )

    async def settle(self, layer: LayerId, stream: Stream) -> None:
        """Wait until the layer's work is recorded, and order the stream behind it (R2).

        Raises TransferFailed when a transfer failed, came short, was revoked or was late.
        """
        all_done = True
        for transfer, leases in self._pending.items():
            completion = transfer.layer_completion(layer)
            if completion.state is CompletionState.DONE:
                continue
            if self._observer is not None:
                self._observer.waited(leases, self._step, layer, transfer)
            await completion.wait_recorded()
            stream.wait(completion)
            self.bound.append(completion)
            all_done = False
        # Only what is DONE is ready for every stream; what is RECORDED is so for this one alone.
        if all_done and layer == self.ready_through:
            self.ready_through = layer + 1

    async def verify(self) -> None:
        """Wait until all that streams were ordered behind is DONE; raise TransferFailed if not."""
        for completion in self.bound:
            await completion.wait_done()


@final
class Openings:
    """Which layers a lease has opened, as runs (first, count) with the log position at the time."""

    __slots__ = ("_position", "runs")

    def __init__(self, position: Callable[[], int]) -> None:
        """Start with none; ``position`` reads the log's present sequence number."""
        self._position = position
        self.runs: list[tuple[int, int, int]] = []

    def note(self, layer: LayerId, count: int = 1) -> None:
        """Remember that ``count`` layers were opened now, folding neighbours and repetitions."""
        position, end = self._position(), layer + count
        if self.runs:
            first, had, after = self.runs[-1]
            if after == position and first <= layer <= first + had:
                self.runs[-1] = (first, max(had, end - first), after)
                return
        self.runs.append((layer, count, position))
