"""What follows the joined projection, on the device against its twins."""

import pytest
import torch
from torch import Tensor

from kvlease.kernels.compressors import compressed_rows, overlapping_slots
from kvlease.kernels.formats import decode_rows, encode_rows, storage_dtype, storage_width
from kvlease.kernels.gpu.after_projection import Heads, Near, Pooling, after_projection
from kvlease.kernels.gpu.compress_row import Compressor
from kvlease.kernels.gpu.query_heads import query_heads
from kvlease.kernels.gpu.rotation import turn_tables
from kvlease.kernels.gpu.row_formats import pad_bytes, row_kind, row_store
from kvlease.kernels.gpu.step_rows import StepRows, projected
from kvlease.kernels.norms import rms_norm, rms_normalize
from kvlease.kernels.rope import RopeSpec, Yarn, inverse_frequencies, rotate_trailing_, rotation
from kvlease.protocols.schema import Encoding, RowFormat

SPEC = RopeSpec(16, 160000.0, Yarn(4.0, 64))
EPS = 1e-6


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert torch.isfinite(got.float()).all()
    assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < tolerance


def int32(numbers: list[int] | list[list[int]], device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    frequencies = inverse_frequencies(SPEC, torch.float32, x.device)
    return rotate_trailing_(x.clone(), rotation(positions.long(), frequencies))


class State:
    """A compressor's weights, poisoned memory, and what a sequence of rows should leave there."""

    def __init__(
        self, device: str, width: int, ratio: int, fmt: RowFormat, *, overlaps: bool, columns: int
    ) -> None:
        self.width, self.ratio, self.fmt, self.overlaps = width, ratio, fmt, overlaps
        self.joined = 2 * width if overlaps else width
        self.ring = 2 * ratio if overlaps else ratio
        self.columns = columns
        self.bias = torch.randn(ratio, self.joined, device=device)
        self.norm = torch.rand(width, device=device) + 0.5
        shape = (3, self.ring, self.joined)
        self.kv = torch.full(shape, torch.nan, device=device, dtype=torch.bfloat16)
        self.gate = torch.full(shape, torch.nan, device=device)
        self.page_rows = 16 // ratio
        self.pages = torch.empty(
            (9, self.page_rows, storage_width(fmt)), dtype=storage_dtype(fmt), device=device
        )
        self.pages.view(torch.uint8).fill_(0xFF)

    def arguments(self) -> tuple[Compressor, Pooling]:
        turns = turn_tables(SPEC, 128, self.kv.device)
        work = Compressor(
            self.bias, self.norm, self.kv, self.gate, row_store(self.pages, self.fmt), turns, EPS
        )
        pooling = Pooling(
            self.columns, self.columns + self.joined, self.width, 16, self.ratio, self.ring,
            self.overlaps, self.page_rows, row_kind(self.fmt), pad_bytes(self.fmt),
        )  # fmt: skip
        return work, pooling

    def stored_row(self, page: int, row: int) -> Tensor:
        """One stored row, decoded, wherever the page keeps its parts."""
        if not self.fmt.planes:
            return decode_rows(self.pages[page, row], self.fmt, torch.float32)
        keys, scales = (
            self.pages[page].flatten().split([self.page_rows * self.width, self.page_rows * 4])
        )
        parts = keys.view(-1, self.width)[row], scales.view(-1, 4)[row]
        return decode_rows(torch.cat(parts), self.fmt, torch.float32)

    def wanted_row(self, history: Tensor, group: int) -> Tensor:
        """The stored row of a group, from all projected rows of its sequence, decoded."""
        kv = history[:, self.columns : self.columns + self.joined].bfloat16().float()
        at = torch.arange(len(history), device=kv.device) % self.ratio
        first = self.columns + self.joined
        gate = history[:, first : first + self.joined] + self.bias[at]
        end = (group + 1) * self.ratio
        values, gates = (x[end - self.ratio : end].unsqueeze(0) for x in (kv, gate))
        if self.overlaps:
            opening = torch.tensor([group == 0], device=kv.device)
            before = slice(max(end - 2 * self.ratio, 0), max(end - self.ratio, self.ratio))
            values = overlapping_slots(
                kv[None, before, : self.width], values[..., self.width :], opening, 0.0
            )
            gates = overlapping_slots(
                gate[None, before, : self.width], gates[..., self.width :], opening, -torch.inf
            )
        first_position = torch.tensor([group * self.ratio], device=kv.device)
        turn = rotation(first_position, inverse_frequencies(SPEC, torch.float32, kv.device))
        row = compressed_rows(values, gates, self.norm, EPS, turn)
        return decode_rows(encode_rows(row, self.fmt), self.fmt, torch.float32)[0]


FORMATS: list[tuple[Encoding, Encoding]] = [("bfloat16", "bfloat16"), ("fp8_latent", "fp8_index")]


@pytest.mark.parametrize(("latent", "index"), FORMATS)
def test_decode_rows_fill_rings_and_pages(latent: Encoding, index: Encoding, device: str) -> None:
    """Two sequences and a padding row, token by token through several groups."""
    torch.manual_seed(1)
    q, d, heads, window = 24, 64, 16, 8
    main = State(device, d, 4, RowFormat(latent, d, 16), overlaps=True, columns=q + d)
    inner = State(
        device, 32, 4, RowFormat(index, 32), overlaps=True, columns=main.columns + 2 * main.joined
    )
    heads_at = inner.columns + 2 * inner.joined
    total, steps = heads_at + heads, 17
    q_norm, kv_norm = torch.rand(q, device=device), torch.rand(d, device=device)
    rings = torch.full((3, window, d), torch.nan, device=device, dtype=torch.bfloat16)
    turns = turn_tables(SPEC, 128, rings.device)
    table = int32([[7, 2, 5], [3, 8, 6], [99, 99, 99]], device)
    slots, history = int32([2, 0, 77], device), torch.randn(2, steps + 5, total, device=device)
    ahead = 5
    for step in range(steps + ahead):
        # the second sequence starts later, so that groups end at different steps
        places = [step if step < steps else -1, step - ahead if step >= ahead else -1, -1]
        values = torch.full((2, 3, total), torch.nan, device=device)
        for n, position in enumerate(places):
            if position >= 0:
                values[0, n] = history[n, position] * 0.25
                values[1, n] = history[n, position] * 0.75
            else:
                values[:, n] = 1.0
        rank = torch.full((3, q), torch.nan, device=device, dtype=torch.bfloat16)
        scaled = torch.full((3, heads), torch.nan, device=device)
        positions = int32(places, device)
        near = Near(q_norm, kv_norm, rank, rings, None, None, turns, EPS)
        after_projection(
            StepRows(positions, table, slots, None, None, None, 3), projected(values), near,
            main.arguments(), inner.arguments(), (Heads(scaled, 0.5), heads_at), 16,
        )  # fmt: skip
        for n, position in enumerate(places[:2]):
            if position < 0:
                continue
            x = history[n, position]
            close(rank[n], rms_norm(x[:q], q_norm, EPS), 4e-3)
            close(scaled[n], x[heads_at:] * 0.5, 1e-5)
            wanted = turned(rms_norm(x[None, q : q + d], kv_norm, EPS), positions[n : n + 1])
            close(rings[slots[n], position % window], wanted[0], 6e-3)
            for state in (main, inner):
                if position % 4 == 3:
                    page = int(table[n, position // 16])
                    got = state.stored_row(page, position // 4 % state.page_rows)
                    close(got, state.wanted_row(history[n], position // 4), 2e-2)
    written = main.pages.view(torch.uint8).ne(0xFF).any(dim=2).sum()
    assert int(written) == sum(steps // 4 for _ in range(2))
    assert torch.isnan(main.kv[1].float()).all(), "a ring that belongs to nobody was written"


@pytest.mark.parametrize("count", [11, 2])
def test_a_chunk_looks_back_and_then_fills_the_rings(count: int, device: str) -> None:
    """Rows before it come from the rings, though its last rows then take those places."""
    torch.manual_seed(2)
    q, d, ratio, ring, start = 16, 32, 8, 8, 5
    state = State(device, d, ratio, RowFormat("bfloat16", d, 16), overlaps=False, columns=q + d)
    total, end = state.columns + 2 * d, start + count
    history = torch.randn(end, total, device=device)
    kv = history[:, state.columns : state.columns + d].bfloat16()
    gate = history[:, state.columns + d :] + state.bias[torch.arange(end, device=device) % ratio]
    state.kv[1, :start], state.gate[1, :start] = kv[:start], gate[:start]
    rings = torch.full((2, ring, d), torch.nan, device=device, dtype=torch.bfloat16)
    rings[1] = torch.randn(ring, d, device=device)
    old = [rings[1, position % ring].clone() for position in range(start)]
    own = torch.arange(count, dtype=torch.int32, device=device) + len(old)
    window = torch.full((count + len(old), d), torch.nan, device=device, dtype=torch.bfloat16)
    rank = torch.empty(count, q, device=device, dtype=torch.bfloat16)
    positions, none = own - len(old) + start, own * 0
    table = int32([[4]], device)
    rows = StepRows(positions, table, int32([1], device), none, none + start, none + end - 1, 1)
    turns = turn_tables(SPEC, 128, rank.device)
    ones = torch.ones(d, device=device)
    near = Near(torch.ones(q, device=device), ones, rank, rings, window, own, turns, EPS)
    chunk = history[start:]
    after_projection(rows, projected(chunk[None]), near, state.arguments(), None, None, 16)
    for group in range(end // ratio):
        close(state.pages[4, group].float(), state.wanted_row(history, group), 8e-3)
    close(window[len(old) :], turned(rms_norm(chunk[:, q : q + d], ones, EPS), positions), 6e-3)
    assert torch.equal(window[: len(old)], torch.stack(old))
    kept = window[-ring:]
    for position, row in zip(range(end - len(kept), end), kept, strict=True):
        assert torch.equal(rings[1, position % ring], row)
    for position in range(max(end - state.ring, 0), end):
        assert torch.equal(state.kv[1, position % state.ring], kv[position])
        assert torch.equal(state.gate[1, position % state.ring], gate[position])
    for ring_of in (rings, state.kv, state.gate):
        assert torch.isnan(ring_of[0]).all(), "a ring that belongs to nobody was written"


@pytest.mark.parametrize("indexed", [True, False])
def test_query_heads(indexed: bool, device: str) -> None:
    torch.manual_seed(3)
    positions = int32([0, 77, -1], device)
    asked = torch.randn(3, 6 * 64 + 5 * 32, device=device).bfloat16()
    turns = turn_tables(SPEC, 128, asked.device)
    shape = (5, 32) if indexed else None
    heads, index_heads = query_heads(asked, positions, turns, 16, EPS, (6, 64), shape)
    wanted = turned(rms_normalize(asked[:, :384].float().view(3, 6, 64), EPS), positions.clamp(0))
    close(heads, wanted, 4e-3)
    assert (index_heads is not None) == indexed
    if index_heads is not None:
        plain = asked[:, 384:].float().view(3, 5, 32)
        close(index_heads, turned(plain, positions.clamp(0)), 4e-3)
