"""What follows when a step's check finds pages changed: nobody reads them any more.

The page goes from both tiers with all that was computed from it: what the device has came from the
host or went there. Its readers start over; this module finds them and restarts nobody.
"""

from array import array

from kvlease.protocols.events import PageMismatch
from kvlease.runtime.core import EngineCore
from kvlease.runtime.messages import StepOrder
from kvlease.runtime.sequence import Sequence


def drop_mismatches(core: EngineCore, order: StepOrder) -> list[Sequence]:
    """Say, count and drop what a step's checks found, and mark everybody who reads it.

    Returns those readers that are in no step, and so are to be restarted now; a reader in another
    step is when that one ends, and publishes nothing of it.
    """
    for check in order.lease.checks:
        if not check.findings:
            continue
        seq = next(s for s in order.members if s.require_held().lease.id == check.lease)
        if core.sink.normal:
            for found in check.findings:
                runs = core.pool.memory.device.runs(array("i", [found.page]))
                core.sink.emit(
                    PageMismatch(
                        pages=runs,
                        layer=found.layer,
                        component=found.component,
                        request=seq.request.id,
                    )
                )
        core.counters.audit_mismatches += len({found.number for found in check.findings})
        first = min(check.findings, key=lambda found: found.number)
        core.pool.condemn(seq.require_held().cursor, first.number)
        _mark_readers(core, first.number, first.page)
    for step in core.steps.values():
        if step is not None and any(seq.require_held().is_spoiled for seq in step.members):
            step.is_spoiled = True
    return [
        seq
        for seq in core.running
        if seq.require_held().is_spoiled and not seq.in_step and seq not in order.members
    ]


def _mark_readers(core: EngineCore, number: int, page: int) -> None:
    """Mark who has the page in its table, and so whatever follows it there."""
    for seq in core.running:
        pages = seq.require_held().lease.pages
        if len(pages) > number and pages[number] == page:
            seq.require_held().is_spoiled = True
