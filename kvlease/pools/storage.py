"""The memory of one tier: rows of pages, rings of running sequences, slots of kept tails.

Three kinds of store, all built from the schema alone, one tensor per (layer, component). They know
shapes and bytes, not who may touch them; only pools hold them. Where a device's engines copy, those
tensors are views into records.
"""

import math
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
import torch

from kvlease.errors import ConfigError
from kvlease.pools.pinned import pinned_bytes
from kvlease.pools.records import Records
from kvlease.protocols.host_layout import LayerGroup, page_groups, tail_groups
from kvlease.protocols.ports import CopyPart, CopyParts
from kvlease.protocols.schema import RowFormat, Schema, SpanComponent, TailComponent
from kvlease.units import LayerId

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "byte": torch.uint8,
}
Part = tuple[LayerId, str]
"""A layer and one of its components."""
_POISON_BYTE = 0xFF
"""Every float format reads 0xFF bytes as NaN (e4m3 included)."""


def row_shape(fmt: RowFormat) -> tuple[torch.dtype, int]:
    """Return the dtype and length of one stored row: values if plain, packed bytes if not."""
    if fmt.is_plain:
        return _DTYPES[fmt.encoding], fmt.width
    return torch.uint8, fmt.nbytes


def poison(rows: torch.Tensor) -> None:
    """Fill rows with bytes that read as NaN, so that an early read cannot pass unseen.

    On a device the call waits for it: who is given the rows may write them on any stream.
    """
    rows.view(torch.uint8).fill_(_POISON_BYTE)
    _wait_for(rows)


def _wait_for(rows: torch.Tensor) -> None:
    if rows.is_cuda:
        torch.cuda.current_stream(rows.device).synchronize()


def on_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return numbers from host memory where a device's kernels read them, without waiting.

    Ownership: the result is in the order of the calling worker's stream. The pinned copy in between
    belongs to torch, which gives it out again only after the stream has read it (R13).
    """
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, pinned: bool
) -> torch.Tensor:
    try:
        if device == "cpu" and not pinned:
            # Zeros that the system makes when a page is first touched: no time, and memory that
            # nobody wrote reads the same in every run.
            zeros = np.zeros(math.prod(shape), f"i{dtype.itemsize}")
            return torch.from_numpy(zeros).view(dtype).view(shape)
        if pinned:
            return pinned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)
    except (MemoryError, RuntimeError) as error:  # torch has no name of its own for this one
        where = "the host, pinned," if pinned else device
        gb = math.prod(shape) * dtype.itemsize / 1e9
        raise ConfigError(
            f"there is no memory for {gb:,.1f} GB of cache on {where}: give fewer device_pages or"
            " host_pages"
        ) from error


def _records(groups: Sequence[LayerGroup], count: int, device: str, pinned: bool) -> Records:
    return Records(groups, count, lambda n: _allocate((n,), torch.uint8, device, pinned))


@final
class SpanStore:
    """Rows of every page: per (layer, span component) [num_pages, rows_per_page, row]."""

    def __init__(
        self,
        schema: Schema,
        num_pages: int,
        device: str = "cpu",
        *,
        pinned: bool = False,
        in_records: bool = False,
    ) -> None:
        """Allocate all pages; contents are undefined until written."""
        self.num_pages = num_pages
        self.records: Records | None = None
        if in_records:
            self.records = _records(page_groups(schema), num_pages, device, pinned)
        self.memory: dict[Part, torch.Tensor] = {}
        self.parts = tuple(
            (
                CopyParts((CopyPart(layer, span.name),)),
                (layer, span.name),
                schema.rows_per_page(span) * span.format.nbytes,
            )
            for layer, span in span_components(schema)
        )
        """Every component, in layer order, as a part and by name, with its bytes of one page."""
        self.handles: dict[Part, tuple[torch.Tensor, int, tuple[int, ...]]] = {}
        """What a handle of each component is made of: rows, rows a page, `RowFormat.planes`."""
        for layer in schema.layers:
            for span in layer.spans:
                dtype, length = row_shape(span.format)
                shape = schema.rows_per_page(span), length
                rows = self.memory[layer.id, span.name] = (
                    _allocate((num_pages, *shape), dtype, device, pinned)
                    if self.records is None
                    else self.records.component(layer.id, span.name, dtype, shape)
                )
                self.handles[layer.id, span.name] = rows, shape[0], span.format.planes

    def rows(self, layer: LayerId, component: str) -> torch.Tensor:
        """Borrow the rows of one component of one layer."""
        return self.memory[layer, component]

    def poison_pages(self, pages: torch.Tensor) -> None:
        """Fill whole pages with NaN bytes, as `poison` does; pages [n] int64."""
        for rows in self.memory.values():
            rows.view(torch.uint8).index_fill_(0, pages.to(rows.device), _POISON_BYTE)
            _wait_for(rows)

    def poison_all(self) -> None:
        """Fill the whole store with NaN bytes."""
        for rows in self.memory.values():
            poison(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store."""
        return sum(rows.nbytes for rows in self.memory.values())


@final
class RingStore:
    """Running state: per (layer, tail component) [num_slots, ring_rows, width]."""

    def __init__(self, schema: Schema, num_slots: int, device: str = "cpu") -> None:
        """Allocate all slots; contents are undefined until written."""
        self.device = torch.device(device)
        self._rings: dict[tuple[LayerId, str], torch.Tensor] = {}
        for layer_id, tail in tail_components(schema):
            dtype, width = row_shape(tail.format)
            shape = (num_slots, tail.ring_rows, width)
            self._rings[layer_id, tail.name] = _allocate(shape, dtype, device, pinned=False)

    def ring(self, layer: LayerId, component: str) -> torch.Tensor:
        """Borrow the rings of one component of one layer."""
        return self._rings[layer, component]

    def poison_slot(self, slot: int) -> None:
        """Fill one sequence's rings with NaN bytes."""
        for ring in self._rings.values():
            poison(ring[slot])


@final
class TailStore:
    """Kept tails: per (layer, tail component) [num_tails, kept_rows, kept_width]."""

    def __init__(
        self,
        schema: Schema,
        num_tails: int,
        device: str = "cpu",
        *,
        pinned: bool = False,
        in_records: bool = False,
    ) -> None:
        """Allocate all slots; components that keep nothing have no tensor."""
        self.records: Records | None = None
        if in_records:
            self.records = _records(tail_groups(schema), num_tails, device, pinned)
        self.memory: dict[Part, torch.Tensor] = {}
        self.parts = tuple(
            (CopyParts((CopyPart(layer, tail.name),)), (layer, tail.name), tail.kept_nbytes)
            for layer, tail in tail_components(schema)
            if tail.kept_rows
        )
        """Every component that is kept, as in `SpanStore`, with its bytes of one tail."""
        for layer_id, tail in tail_components(schema):
            if tail.kept_rows:
                dtype, _ = row_shape(tail.format)
                shape = tail.kept_rows, tail.kept_width
                self.memory[layer_id, tail.name] = (
                    _allocate((num_tails, *shape), dtype, device, pinned)
                    if self.records is None
                    else self.records.component(layer_id, tail.name, dtype, shape)
                )

    def kept(self, layer: LayerId, component: str) -> torch.Tensor:
        """Borrow the kept rows of one component of one layer."""
        return self.memory[layer, component]

    def poison_slot(self, slot: int) -> None:
        """Fill one kept tail with NaN bytes."""
        for kept in self.memory.values():
            poison(kept[slot])


def tail_components(schema: Schema) -> Iterator[tuple[LayerId, TailComponent]]:
    """Yield every tail component with its layer, in layer order."""
    for layer in schema.layers:
        for tail in layer.tails:
            yield layer.id, tail


def span_components(schema: Schema) -> Iterator[tuple[LayerId, SpanComponent]]:
    """Yield every span component with its layer, in layer order."""
    for layer in schema.layers:
        for span in layer.spans:
            yield layer.id, span
