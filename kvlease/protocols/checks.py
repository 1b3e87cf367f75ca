"""Checks of pages before a step's first read of them: what they find, and how a reader waits.

This module does not know what is compared; it knows that nothing is read before it was.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, final

from attrs import frozen

from kvlease.errors import NotReady
from kvlease.protocols.ports import Stream
from kvlease.protocols.readiness import GateObserver, PendingTransfer, Readiness
from kvlease.units import LayerId, LeaseId, StepId


@frozen
class Finding:
    """One component of one page that is not what it was when the page was sealed.

    ``number`` is the page's place in its sequence, ``page`` its id on the device.
    """

    number: int
    page: int
    layer: LayerId
    component: str


class PageCheck(Protocol):
    """What one sequence's pages are checked by, layer by layer, before its first step."""

    @property
    def lease(self) -> LeaseId:
        """Whose pages they are."""
        ...

    @property
    def num_pages(self) -> int:
        """How many pages are compared."""
        ...

    @property
    def findings(self) -> Sequence[Finding]:
        """What was found wrong; complete once the step's work has ended."""
        ...

    def run(self, layer: LayerId) -> None:
        """Compare one layer, on the stream; raises PageMismatch, so that nothing is computed.

        A device's sums are not known so early: they are compared by `conclude`.
        """
        ...

    def conclude(self) -> None:
        """Compare what `run` could not, once the step's work has ended; raises PageMismatch."""
        ...


@final
class CheckedReadiness(Readiness):
    """Readiness of a step whose pages are to be checked: no layer is ready before its check.

    The check is launched when the layer is resolved, behind the load that fills it and before
    the layer's own work, which overwrites rings. A ready layer of a step without checks is told by
    the one comparison in the lease, as ever.
    """

    __slots__ = ("_checks", "_unchecked")

    def __init__(
        self,
        num_layers: int,
        pending: Iterable[tuple[LeaseId, PendingTransfer]],
        checks: Sequence[PageCheck],
        observer: GateObserver | None,
        step: StepId,
    ) -> None:
        """Start with nothing ready."""
        super().__init__(num_layers, pending, observer, step)
        self._checks = checks
        self._unchecked = set(range(num_layers))
        self.ready_through = 0

    def check(self, layer: LayerId) -> None:
        """Raise NotReady unless the layer has arrived and its check has been launched."""
        super().check(layer)
        if layer in self._unchecked:
            raise NotReady(f"layer {layer} is to be checked first; await resolve() instead")

    async def settle(self, layer: LayerId, stream: Stream) -> None:
        """Wait for the layer's work, and launch its check behind it, once."""
        await super().settle(layer, stream)
        if layer in self._unchecked:
            self._unchecked.remove(layer)
            for check in self._checks:
                work: Callable[[], None] = partial(check.run, layer)
                stream.launch(work)
