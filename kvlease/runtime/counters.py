"""What an engine counts, and the frozen picture of it that users get.

Counters only grow; gauges are read from their owners when the picture is taken.
"""

from attrs import define, frozen

from kvlease.pools.page_book import Ledger


@define
class Counters:
    """Running totals of one engine, in the units their names end in."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_device: int = 0
    hit_host: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    discarded_steps: int = 0
    loads: int = 0
    stores: int = 0
    failed_transfers: int = 0
    transfer_timeouts: int = 0
    skipped_stores: int = 0
    restored_bytes: int = 0
    stored_bytes: int = 0
    gate_waits: int = 0
    gate_wait_s: float = 0.0
    recompute_choices: int = 0
    audited_pages: int = 0
    audit_mismatches: int = 0
    actor_restarts: int = 0


@frozen
class Statistics:
    """A picture of an engine: its counters so far, and its pools now.

    ``ledger_ok`` is the result of a full recount of every pool against its holders (R11).
    """

    counters: Counters
    waiting: int
    running: int
    device: Ledger
    host: Ledger
    device_tails: Ledger
    host_tails: Ledger
    slots: Ledger
    ledger_ok: bool
    ledger_error: str | None
