"""What the race is about, as plain data: what all rows share, and which rows there are.

Loads neither torch nor trio.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from kvlease.services.lab.spec import DeviceSpec, LinkSpec

IndexFormat: TypeAlias = Literal["fp8", "bf16"]
Gate: TypeAlias = Literal["full", "kv-only", "off"]

RACE_DEVICE = DeviceSpec(
    load=LinkSpec(latency_s=50e-6, bytes_per_s=3.2e6),
    store=LinkSpec(latency_s=50e-6, bytes_per_s=200e6),
    step_s=2e-3,
    token_s=40e-6,
)
"""A link and a compute stream in proportion.

A history to restore is two or three pages: 15 KB with bf16 index keys and 13 KB with fp8, 4.6 and
4.0 ms on this link, against 6 ms to compute it again. So a restore pays, and with 64 sessions and
more, whose histories the device cannot hold, the link is about as busy as compute. Stores carry
kept tails besides, which are large in so small a model, and get the bandwidth for it.
"""


class RaceSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows have in common.

    Attributes:
        num_sessions: served in every row.
        device_pages: room for the histories of some 30 sessions.
        load_timeout_s: virtual seconds within which a transfer must be over.
    """

    seed: int = 0
    num_sessions: int = 80
    device_pages: int = 144
    host_pages: int = 2048
    load_timeout_s: float = 0.05
    device: DeviceSpec = RACE_DEVICE


class RowJob(msgspec.Struct, frozen=True, kw_only=True, tag="row"):
    """Which row, and where its log goes; ``sessions`` are served at a time."""

    host_cache: bool
    index_k_format: IndexFormat
    gate: Gate
    sessions: int
    log: str | None = None

    @property
    def name(self) -> str:
        """A name for files and messages."""
        if not self.host_cache:
            return f"nohost-{self.index_k_format}-{self.sessions}"
        return f"host-{self.index_k_format}-{self.gate}-{self.sessions}"


class ColdJob(msgspec.Struct, frozen=True, kw_only=True, tag="cold"):
    """One session to be answered cold with these formats."""

    session: int
    formats: tuple[IndexFormat, ...]
