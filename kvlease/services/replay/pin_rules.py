"""Rules about pins: every one has an end, its own caller's or that of what it keeps (R9, R10)."""

from typing import final

from kvlease.protocols.events import PagePin, PageUnpin
from kvlease.services.replay.state import GRACE_NS, World


@final
class PinRules:
    """Follows ``page.pin`` and ``page.unpin``."""

    def __init__(self, world: World) -> None:
        """Share the world."""
        self._world = world
        self._findings = world.findings

    def pinned(self, event: PagePin) -> None:
        """Remember a pin."""
        before = self._world.pins.get(event.pin)
        if before is not None:
            what = f"pin {event.pin} was given out while it was one already"
            self._findings.violate("R14", what, (before.seq, event.seq))
        self._world.pins[event.pin] = event

    def unpinned(self, event: PageUnpin) -> None:
        """End a pin, and ask who did and when."""
        world = self._world
        pin = world.pins.pop(event.pin, None)
        if pin is None:
            if not world.is_lossy:
                what = f"pin {event.pin} ended without having begun"
                self._findings.violate("R14", what, (event.seq,))
            return
        if event.identity not in ("", pin.identity):
            what = f"pin {pin.pin} was ended for another tenant than the one that it belongs to"
            self._findings.violate("R10", what, (pin.seq, event.seq))
        _check_time(world, pin, event.seq, event.t_ns)


def check_pins(world: World, seq: int, t_ns: int) -> None:
    """Judge the pins that are left when the log ends."""
    for pin in world.pins.values():
        _check_time(world, pin, seq, t_ns)


def _check_time(world: World, pin: PagePin, seq: int, t_ns: int) -> None:
    """A pin has ended at ``t_ns``, or not even then."""
    if t_ns > pin.deadline_ns + GRACE_NS:
        what = f"pin {pin.pin} kept {pin.pages} pages for longer than it was asked for"
        world.findings.violate("R9", what, (pin.seq, seq))
    flush = world.flushed_pins.pop(pin.pin, None)
    if flush is not None and t_ns > flush.t_ns + GRACE_NS:
        what = f"pin {pin.pin} kept {pin.pages} pages that a flush had forgotten"
        world.findings.violate("R10", what, (pin.seq, flush.seq, seq))
