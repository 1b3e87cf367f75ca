"""Steps of every size that a model may be asked for, so that their kernels can be compiled ahead.

What a launch is compiled for follows from a step's sizes, the layers' kinds and the rows' formats;
so one layer of each kind is gone through, over memory of one page.
"""

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.formats import storage_dtype, storage_width
from kvlease.kernels.gpu.few_rows import FEW
from kvlease.kernels.gpu.greedy import Following
from kvlease.kernels.gpu.step_rows import StepRows
from kvlease.kernels.models.decode_graph import LEAST_PAGES, MAX_BUCKET, Layout, round_to_power
from kvlease.kernels.models.device_attention import ChunkWindows
from kvlease.kernels.models.device_choice import Stretch
from kvlease.kernels.models.device_rows import LayerMemory, Rings, step_rows
from kvlease.kernels.models.device_step import DeviceLayers, Pending
from kvlease.protocols.schema import AnyLayer, RowFormat, Schema

_MANY = 4 * FEW
"""Rows of a chunk above which nothing is compiled anew."""


@frozen
class Rehearsal:
    """What is gone through: sizes of decode batches, pages of sequences, and rows of chunks."""

    batches: tuple[int, ...]
    pages: tuple[int, ...]
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, sessions: int, pages: int) -> "Rehearsal":
        """Cover batches of up to so many sequences of up to so many pages each."""
        most = round_to_power(min(sessions, MAX_BUCKET))
        longest = max(LEAST_PAGES, round_to_power(pages))
        return cls(_powers(1, most), _powers(LEAST_PAGES, longest), _powers(FEW // 4, _MANY))


def _powers(least: int, most: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(least.bit_length() - 1, most.bit_length()))


@torch.inference_mode()
def rehearse(layers: DeviceLayers, schema: Schema, sizes: Rehearsal) -> None:
    """Launch all steps of these sizes; only for kernels that are compiled and not run."""
    part = _Parts(layers, schema)
    for pages in sizes.pages:
        for batch in sizes.batches:
            part.decode_step(batch, pages)
        part.chunk(_MANY, pages)
    for rows in sizes.chunks:
        part.chunk(rows, LEAST_PAGES)


class _Parts:
    """One layer of each kind, a page and a slot for it, and steps over them."""

    def __init__(self, layers: DeviceLayers, schema: Schema) -> None:
        self._layers, self._schema = layers, schema
        self._device = layers.packed.weights.embed.device
        mlps = layers.config.mlp_kinds
        kinds = {(type(one), mlps[one.id]): one for one in schema.layers}
        self._memory = [(one, self._memory_of(one)) for one in kinds.values()]

    def _memory_of(self, layer: AnyLayer) -> LayerMemory:
        rows: dict[str, Tensor] = {}
        for span in layer.spans:
            rows[span.name] = self._empty(self._schema.rows_per_page(span), span.format)
        for tail in layer.tails:
            rows[tail.name] = self._empty(tail.ring_rows, tail.format)
        rings = {
            name: Rings(rows[f"{name}_kv"], rows[f"{name}_gate"])
            for name in ("compressor", "index_compressor")
            if f"{name}_kv" in rows
        }
        return LayerMemory(rows["window"], rows.get("latent"), rows.get("index_k"), **rings)

    def _empty(self, rows: int, fmt: RowFormat) -> Tensor:
        shape = 1, rows, storage_width(fmt)
        return torch.empty(shape, dtype=storage_dtype(fmt), device=self._device)

    def decode_step(self, batch: int, pages: int) -> None:
        """Launch a decode step of ``batch`` sequences, ``pages`` pages each."""
        layout = Layout(batch, pages)
        rows, tokens = layout.parts(self._numbers(layout.size))
        self._step(rows, tokens, None)

    def chunk(self, count: int, pages: int) -> None:
        """Launch a chunk of ``count`` rows of four sequences that have so many pages each.

        Where a sequence's rows begin and how many keys they see need be no multiples of anything.
        """
        config = self._layers.config
        numbers, table = self._numbers(count), self._numbers(4 * pages).view(4, pages)
        rows = step_rows(numbers, table, self._numbers(4), numbers, numbers, numbers)
        keys = pages * self._schema.page_tokens // config.sparse_ratio
        windows = torch.empty((count, config.head_dim), dtype=torch.bfloat16, device=self._device)
        ends = count // 4 | 1, count // 2, count // 4 * 3 | 1, count
        stretches = tuple(
            Stretch(n, first, end, keys - n // 2)
            for n, (first, end) in enumerate(zip((0, *ends), ends, strict=False))
        )
        self._step(rows, numbers, ChunkWindows(windows, numbers, stretches))

    def _numbers(self, count: int) -> Tensor:
        return torch.full((count,), -1, dtype=torch.int32, device=self._device)

    def _step(self, rows: StepRows, tokens: Tensor, windows: ChunkWindows | None) -> None:
        before: Pending | Tensor = tokens
        for layer, part in self._memory:
            before = self._layers.layer(before, tokens, layer, part, rows, windows)
        assert isinstance(before, Pending), "a model has layers"
        following = Following(rows.positions, tokens) if windows is None else None
        self._layers.finish(before, following)
