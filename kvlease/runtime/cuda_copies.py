"""Joining an engine's memory with what moves it on a CUDA device.

Triton is loaded here, and only where there is a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlease.pools.memory import Memory
from kvlease.pools.records import Records
from kvlease.pools.storage import SpanStore, TailStore, tail_components

if TYPE_CHECKING:
    from kvlease.kernels.gpu.carrier import PageEnds, TailEnds


def give_carrier(memory: Memory) -> None:
    """Let a carrier move a memory's records, from the first transfer on.

    Raises OperatingError when the driver cannot copy in batches.
    """
    from kvlease.kernels.gpu.carrier import Carrier

    memory.carrier = Carrier(_page_ends(memory), _tail_ends(memory), memory.rings.device)


def _page_ends(memory: Memory) -> PageEnds:
    from kvlease.kernels.gpu.carrier import PageEnds

    host = _records(memory.host_spans)
    groups = [
        ([(memory.spans.rows(p.layer, p.component), p.offset) for p in group.pieces], group.nbytes)
        for group in host.groups
    ]
    return PageEnds(host.memory, tuple(groups))


def _records(store: SpanStore | TailStore) -> Records:
    assert store.records is not None, "memory of a CPU has no records to carry"
    return store.records


def _tail_ends(memory: Memory) -> TailEnds:
    from kvlease.kernels.gpu.carrier import TailEnds
    from kvlease.kernels.gpu.tail_copy import TailPiece

    host, device = _records(memory.host_tails), _records(memory.tails)
    kept = {(layer, tail.name): tail for layer, tail in tail_components(memory.schema)}
    pieces: list[TailPiece] = []
    for group in host.groups:
        for piece in group.pieces:
            tail = kept[piece.layer, piece.component]
            rings = memory.rings.ring(piece.layer, piece.component)
            pieces.append(TailPiece(rings, tail.kept_rows, tail.kept_width, piece.offset))
    return TailEnds(host.memory, device.memory, tuple(pieces))
