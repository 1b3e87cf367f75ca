"""The sliding window of one layer inside a step: reading each row's, and keeping the step's own.

A sequence's last tokens lie in a ring; a step's own rows are not there yet when it reads.
"""

import torch
from torch import Tensor

from kvlease.kernels.attention import KeyBlock
from kvlease.kernels.models.step_context import AttentionContext
from kvlease.kernels.views import read_ring_rows, read_rings, ring_rows, write_ring_rows
from kvlease.protocols.views import SlotRows


class Window:
    """The last raw tokens of every row, and the duty to leave this step's rows in the rings."""

    def __init__(self, handle: SlotRows, kv: Tensor, ctx: AttentionContext) -> None:
        """Take the step's own rows, kv [N, head_dim] in the compute dtype; borrow the rings."""
        self._handle = handle
        self._kv = kv
        self._plan = ctx.plan
        self._wide = ctx.wide
        self._ring = ring_rows(handle)
        self._reads = ctx.plan.window_reads(ctx.config.window, self._ring)
        self._old: Tensor | None = None
        if ctx.plan.is_decode:
            self._write()
        else:
            # a chunk may overwrite ring places that its own first rows still look back to
            everyone = torch.arange(ctx.plan.num_sequences)
            old = read_rings(handle, everyone).flatten(0, 1)
            self._old = torch.cat([old, kv[: ctx.plan.num_rows]])

    def block(self, rows: slice | Tensor) -> KeyBlock:
        """Return the windows of some rows of the step."""
        reads, plan = self._reads, self._plan
        if self._old is not None and reads.rows is not None:
            wanted = reads.rows[rows]
            keys = self._old.index_select(0, wanted.flatten()).view(*wanted.shape, -1)
        elif reads.rows is None:
            keys = read_rings(self._handle, plan.sequences[rows])
        else:
            column, wanted = plan.sequence_column[rows], reads.rows[rows]
            keys = read_ring_rows(self._handle, column, wanted, plan.index)
        return KeyBlock(keys.to(self._wide), None if reads.seen is None else reads.seen[rows])

    @property
    def num_keys(self) -> int:
        """Keys that each row's window takes, seen or not."""
        return self._ring

    def keep(self) -> None:
        """Leave the step's last rows in the rings, once nothing reads the old ones any more."""
        if self._old is not None:
            self._write()

    def _write(self) -> None:
        writes = self._plan.ring_writes(self._ring)
        rows = self._kv[: self._plan.num_rows]
        kept = rows if writes.rows is None else rows.index_select(0, writes.rows)
        write_ring_rows(self._handle, writes.sequences, writes.places, kept, self._plan.index)
