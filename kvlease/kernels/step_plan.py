"""Index tensors of one step, built once and shared by all layers.

Rows of all sequences lie one after another; padding rows repeat row 0, so every row is a real
one and no special case follows. Knows positions and ratios, not weights or memory.

What names cached rows (sequences, places, group numbers) stays in host memory, where page tables
are; what meets hidden states (row numbers, masks) is placed on the model's device.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from kvlease.kernels.placing import CPU, place
from kvlease.kernels.tiling import Tiling
from kvlease.kernels.views import RowIndex

GROUP_ROWS = 256
"""Rows of one sequence that are scored against its keys at once."""

_Ints = NDArray[np.int64]


@frozen
class RowGroup:
    """Rows that meet keys together: each its own sequence's, or all the same sequence's.

    ``rows`` [M] are row numbers, padded to the tile by repeating the first; ``count`` are real.
    ``sequences`` [M, 1] if each row has its own, else [1, 1]. ``places`` [., L] are the compressed
    rows to read, clipped to what the sequence has; ``seen`` [M, L] marks what each row sees.
    ``blank`` lists entries of ``sequences`` that have no row at all (what is read for them is to be
    cleared). ``whole`` says that rows are simply 0 .. M - 1 of the step.
    """

    rows: Tensor
    count: int
    sequences: Tensor
    places: Tensor
    seen: Tensor
    visible: Tensor
    blank: Tensor | None
    whole: bool


@frozen
class Visible:
    """What each row sees of one ratio's compressed rows: counts [N], and the rows by group."""

    counts: Tensor
    groups: tuple[RowGroup, ...]
    least: int
    """The smallest of the counts."""
    blind: Tensor | None
    """Rows that see nothing, [.] int64 in host memory, or None if there are none."""


@frozen
class RingWrites:
    """Which rows a step leaves in rings of one size: rows, their sequences and places, all [M]."""

    rows: Tensor | None
    """None when every row of the step is written in order."""
    sequences: Tensor
    places: Tensor


@frozen
class WindowReads:
    """Where each row's window lies.

    ``source`` "rings": whole rings by sequence; "places": ring rows at places [N, W]; "mixed": rows
    [N, W] of (rings of all B sequences, then the step's own rows). ``seen`` [N, W].
    """

    source: Literal["rings", "places", "mixed"]
    rows: Tensor | None
    seen: Tensor | None
    """None when every row sees its whole ring."""


@frozen
class Closings:
    """Groups that end in this step, for one ratio: G of them.

    ``sequences`` [G]; ``groups`` [G] numbers; ``first`` [G] bool. Slots [G, S] cover the current
    group, preceded by the previous one where groups overlap. ``chunk_rows`` [G * S] row numbers of
    the step or None when all is read from rings; ``from_ring`` [Q] which of them lie in rings
    instead, ``ring_sequences`` and ``ring_places`` saying where ([Q], or [G, 1] and [G, S]).
    """

    sequences: Tensor
    groups: Tensor
    first: Tensor
    slots: int
    chunk_rows: Tensor | None
    from_ring: Tensor | None
    ring_sequences: Tensor
    ring_places: Tensor


def _tensor(values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


class Endings:
    """The groups of some ratio that end at given rows, by sequence and number, in host memory."""

    def __init__(self, sequences: _Ints, positions: _Ints) -> None:
        """Take each row's sequence and position, [N]."""
        self._sequences = sequences
        self._positions = positions
        self._found: dict[int, tuple[Tensor, Tensor] | None] = {}

    def of(self, ratio: int) -> tuple[Tensor, Tensor] | None:
        """Return sequences and numbers of the groups of ``ratio`` tokens, None if none ends."""
        if ratio not in self._found:
            ends = np.flatnonzero(self._positions % ratio == ratio - 1)
            numbers = self._positions[ends] // ratio
            found = _tensor(self._sequences[ends]), _tensor(numbers)
            self._found[ratio] = found if len(ends) else None
        return self._found[ratio]


class StepPlan:
    """One step's rows and the index tensors derived from them, each made on first use."""

    def __init__(
        self,
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        tiling: Tiling,
        device: torch.device = CPU,
    ) -> None:
        """Lay out the rows of B sequences: tokens[b] at positions starts[b] and up, none empty."""
        self.tiling = tiling
        self.device = device
        self.index = RowIndex()
        lengths = np.array([len(part) for part in tokens], dtype=np.int64)
        self.num_sequences = len(lengths)
        self.num_rows = int(lengths.sum())
        self.num_padded = tiling.round_rows(self.num_rows)
        self.is_decode = self.num_rows == self.num_sequences
        self._lengths = lengths
        self._starts = np.array(starts, dtype=np.int64)
        self._first_rows = np.cumsum(lengths) - lengths
        sequences = np.repeat(np.arange(self.num_sequences), lengths)
        offsets = np.arange(self.num_rows) - self._first_rows[sequences]
        if self.is_decode:
            flat = np.fromiter((part[0] for part in tokens), np.int64, self.num_sequences)
        else:
            flat = np.concatenate([np.asarray(part, dtype=np.int64) for part in tokens])
        self._sequences = self._pad(sequences)
        self._positions = self._pad(self._starts[sequences] + offsets)
        self._tokens = self._pad(flat)
        self.sequences = _tensor(self._sequences)
        self.sequence_column = self.sequences.unsqueeze(1)
        self.last_rows = self._first_rows + lengths - 1
        self._windows: dict[tuple[int, int], WindowReads] = {}
        self._writes: dict[int, RingWrites] = {}
        self._visible: dict[int, Visible] = {}
        self._closings: dict[tuple[int, int, bool], Closings | None] = {}
        self._phases: dict[int, Tensor] = {}

    @cached_property
    def tokens(self) -> Tensor:
        """Each row's token, [N] int64."""
        return self._placed(self._tokens)

    @cached_property
    def positions(self) -> Tensor:
        """Each row's position, [N] int64."""
        return self._placed(self._positions)

    @cached_property
    def endings(self) -> "Endings":
        """Which groups end in this step."""
        real = slice(self.num_rows)
        return Endings(self._sequences[real], self._positions[real])

    @property
    def host_positions(self) -> _Ints:
        """Each row's position, [N]."""
        return self._positions

    @property
    def host_tokens(self) -> _Ints:
        """Each row's token, [N]."""
        return self._tokens

    @property
    def host_sequences(self) -> _Ints:
        """Each row's sequence, [N]."""
        return self._sequences

    @property
    def host_starts(self) -> _Ints:
        """The first position that each row's sequence computes in this step, [N]."""
        return self._starts[self._sequences]

    def _placed(self, values: NDArray[np.generic]) -> Tensor:
        return place(_tensor(values), self.device)

    def _pad(self, rows: _Ints) -> _Ints:
        return np.concatenate([rows, np.repeat(rows[:1], self.num_padded - len(rows))])

    def phases(self, ratio: int) -> Tensor:
        """Return position % ratio of each row, [N]."""
        found = self._phases.get(ratio)
        if found is None:
            found = self._phases[ratio] = self._placed(self._positions % ratio)
        return found

    def ring_writes(self, ring: int) -> RingWrites:
        """Return which rows end in rings of ``ring`` places: each sequence's last ones."""
        found = self._writes.get(ring)
        if found is None:
            found = self._writes[ring] = self._plan_writes(ring)
        return found

    def _plan_writes(self, ring: int) -> RingWrites:
        real = np.arange(self.num_rows)
        sequences, positions = self._sequences[: self.num_rows], self._positions[: self.num_rows]
        kept = real > self.last_rows[sequences] - ring
        rows = None if kept.all() else self._placed(real[kept])
        return RingWrites(rows, _tensor(sequences[kept]), _tensor(positions[kept] % ring))

    def window_reads(self, window: int, ring: int) -> WindowReads:
        """Return where each row's last ``window`` tokens lie, by ring place."""
        found = self._windows.get((window, ring))
        if found is None:
            found = self._windows[window, ring] = self._plan_window(window, ring)
        return found

    def _plan_window(self, window: int, ring: int) -> WindowReads:
        here = self._positions[:, None]
        places = np.arange(ring)[None, :]
        # the latest position not after the row's own that lies at each place
        at_place = here - (here - places) % ring
        seen = (at_place >= 0) & (at_place > here - window)
        if self.is_decode:
            if seen.all():
                return WindowReads("rings", None, None)
            # an unseen place may hold poison; the row's own place is always seen
            safe = np.where(seen, places, here % ring)
            return WindowReads("places", _tensor(safe), self._placed(seen))
        at_place = np.where(seen, at_place, here)
        sequence = self._sequences[:, None]
        start = self._starts[sequence]
        in_chunk = self.num_sequences * ring + self._first_rows[sequence] + at_place - start
        in_ring = sequence * ring + at_place % ring
        rows = np.where(at_place >= start, in_chunk, in_ring)
        return WindowReads("mixed", self._placed(rows), self._placed(seen))

    def closings(self, ratio: int, ring: int, *, overlapping: bool) -> Closings | None:
        """Return the groups of ``ratio`` tokens that end in this step, None if there are none."""
        key = (ratio, ring, overlapping)
        if key not in self._closings:
            self._closings[key] = self._plan_closings(ratio, ring, overlapping=overlapping)
        return self._closings[key]

    def _plan_closings(self, ratio: int, ring: int, *, overlapping: bool) -> Closings | None:
        positions = self._positions[: self.num_rows]
        closing = np.flatnonzero(positions % ratio == ratio - 1)
        if not len(closing):
            return None
        sequences = self._sequences[closing]
        groups = positions[closing] // ratio
        reach = 2 * ratio if overlapping else ratio
        slots = positions[closing][:, None] - reach + 1 + np.arange(reach)[None, :]
        places = slots % ring
        head = (_tensor(sequences), _tensor(groups), self._placed(groups == 0), reach)
        if self.is_decode:
            return Closings(*head, None, None, _tensor(sequences[:, None]), _tensor(places))
        start = self._starts[sequences][:, None]
        rows = self._first_rows[sequences][:, None] + slots - start
        outside = (slots < start).ravel()
        from_ring = np.flatnonzero(outside)
        owners = np.repeat(sequences, reach)[from_ring]
        return Closings(
            *head,
            self._placed(np.where(outside, 0, rows.ravel())),
            self._placed(from_ring) if len(from_ring) else None,
            _tensor(owners),
            _tensor(places.ravel()[from_ring]),
        )

    def visible(self, ratio: int) -> Visible:
        """Return what each row sees of the rows that stand for ``ratio`` tokens each."""
        found = self._visible.get(ratio)
        if found is None:
            found = self._visible[ratio] = self._plan_visible(ratio)
        return found

    def _plan_visible(self, ratio: int) -> Visible:
        counts = (self._positions + 1) // ratio
        blind = np.flatnonzero(counts == 0)
        groups: list[RowGroup] = []
        if self.is_decode:
            everything = np.arange(self.num_padded)
            groups.append(self._group(everything, counts, self.num_padded, shared=False))
        else:
            singles = self._first_rows[self._lengths == 1]
            if len(singles):
                groups.append(self._group(singles, counts, len(singles), shared=False))
            for sequence in np.flatnonzero(self._lengths > 1):
                first = int(self._first_rows[sequence])
                end = first + int(self._lengths[sequence])
                for low in range(first, end, GROUP_ROWS):
                    rows = np.arange(low, min(low + GROUP_ROWS, end))
                    groups.append(self._group(rows, counts, len(rows), shared=True))
        return Visible(
            counts=self._placed(counts),
            groups=tuple(groups),
            least=int(counts.min()),
            blind=_tensor(blind) if len(blind) else None,
        )

    def _group(self, rows: _Ints, counts: _Ints, count: int, *, shared: bool) -> RowGroup:
        padding = self.tiling.round_rows(len(rows)) - len(rows)
        rows = np.concatenate([rows, np.repeat(rows[:1], padding)])
        visible = counts[rows]
        owned = visible.max(keepdims=True) if shared else visible
        num_keys = self.tiling.round_keys(int(visible.max()))
        places = np.arange(num_keys)[None, :]
        blank = np.flatnonzero(owned == 0)
        sequences = self._sequences[rows[:1] if shared else rows]
        return RowGroup(
            rows=self._placed(rows),
            count=count,
            sequences=_tensor(sequences[:, None]),
            places=_tensor(np.minimum(places, np.maximum(owned[:, None] - 1, 0))),
            seen=self._placed(places < visible[:, None]),
            visible=self._placed(visible),
            blank=self._placed(blank) if len(blank) else None,
            whole=self.is_decode,
        )
