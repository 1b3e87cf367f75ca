"""The decisions of the product, as one record of pure functions that can be replaced one by one.

Three of them are the product's own machines. The others are one line each and mirror a guard of
the pools, the runtime or the grant book; `test_mirror.py` holds each against the code it mirrors.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvlease.protocols.machines import (
    Copy,
    CopyEvent,
    PageEvent,
    PageState,
    joint_state,
    step_copy,
    step_page,
)
from kvlease.protocols.ports import CompletionState


def may_reclaim(blockers: int) -> bool:
    """Whether a quarantined page may become free, given who may still touch it (PageBook)."""
    return blockers == 0


def may_evict(is_pinned: bool, is_in_flight: bool) -> bool:
    """Whether an edge's page may leave its tier (evictable_pages)."""
    return not is_pinned and not is_in_flight


def may_promise(num_free: int, num_reserved: int) -> bool:
    """Whether one more page can be promised (PageBook.reserve)."""
    return num_free > num_reserved


def may_open(layer: CompletionState) -> bool:
    """Whether a reader that awaits a layer is let through (Readiness.settle)."""
    return layer in (CompletionState.RECORDED, CompletionState.DONE)


def may_run(layer: CompletionState) -> bool:
    """Whether a stream that waits for a layer goes on to what was launched after it."""
    return layer.is_final


def may_publish(layer: CompletionState) -> bool:
    """Whether what a step has read of a layer may be shown (Readiness.verify)."""
    return layer is CompletionState.DONE


def may_begin(whole: CompletionState) -> bool:
    """Whether another copy of a transfer may begin (Transfer.begin_copy)."""
    return not whole.is_final


def is_settled(whole: CompletionState, is_running: bool) -> bool:
    """Whether no copy touches memory any more and none will (Transfer._settle_if_over)."""
    return whole.is_final and not is_running


def accepts(is_open: bool, same_incarnation: bool, same_epochs: bool) -> bool:
    """Whether a remote write is let in (GrantBook.accept)."""
    return is_open and same_incarnation and same_epochs


@dataclass(frozen=True)
class Guards:
    """All decisions of one world. The flags are habits of the product that planted bugs drop."""

    step_page: Callable[[PageState, PageEvent], PageState] = step_page
    step_copy: Callable[[Copy, CopyEvent, int], Copy] = step_copy
    joint_state: Callable[[list[Copy]], CompletionState] = joint_state
    may_reclaim: Callable[[int], bool] = may_reclaim
    may_evict: Callable[[bool, bool], bool] = may_evict
    may_promise: Callable[[int, int], bool] = may_promise
    may_open: Callable[[CompletionState], bool] = may_open
    may_run: Callable[[CompletionState], bool] = may_run
    may_publish: Callable[[CompletionState], bool] = may_publish
    may_seal: Callable[[CompletionState], bool] = may_publish
    may_begin: Callable[[CompletionState], bool] = may_begin
    is_settled: Callable[[CompletionState, bool], bool] = is_settled
    accepts: Callable[[bool, bool, bool], bool] = accepts

    bumps_epoch: bool = True
    """Releasing a page makes every reference to it stale."""
    source_held_until_settled: bool = True
    """The source is pinned until no copy runs, not only until the transfer has ended."""
    lost_waits_for_copies: bool = True
    """What a lost transfer was filling stays in quarantine while a copy may still write it."""
    lost_waits_for_readers: bool = True
    """And while somebody who leased it may still read it."""
    dropped_waits_for_loads: bool = True
    """Where a bad load drops the host's copy too, that waits for other loads still reading it."""
    closes_after_last_use: bool = True
    """A closed lease keeps its pages until what it had launched is over."""
    grant_held_until_stopped: bool = True
    """An expired grant keeps its pages until its writer is known to have stopped."""
    connection_end_stops: bool = True
    """The end of a dead peer's connection ends its grants."""
    has_deadline: bool = True
    """A transfer that is stuck, or whose loader died, is ended by its deadline or supervisor."""
    lost_is_told: bool = True
    """Whoever leases from a transfer hears that it was lost, and starts over."""
    settling_is_told: bool = True
    """The pools hear that a lost transfer has settled."""
