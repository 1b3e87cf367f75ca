"""Decode and prefill attention against the plain twin, with NaN in every row nobody may read."""

import pytest
import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.attention import KeyBlock, sparse_attention
from kvlease.kernels.formats import decode_rows, encode_rows
from kvlease.kernels.gpu.attention_core import Turn
from kvlease.kernels.gpu.attention_launch import (
    Listed,
    Plan,
    Pool,
    Ring,
    Rows,
    Span,
    Visible,
    packed_parts,
    planar_pool,
    pool_of,
)
from kvlease.kernels.gpu.decode_attention import decode_attention
from kvlease.kernels.gpu.prefill_attention import prefill_attention
from kvlease.kernels.tiling import FAST
from kvlease.protocols.schema import RowFormat

WIDTH, ROPE, WINDOW = 64, 16, 32
FORMAT = RowFormat("fp8_latent", WIDTH, ROPE)
ENCODINGS = ["plain", "packed", "planar"]
PLANS = [Plan(16, 32, 1, 4, 2), Plan(16, 16, 3, 4, 2)]


@frozen
class Store:
    """A pool of random rows, what they hold, and how to spoil all rows but some."""

    pool: Pool
    flat: Tensor

    def spoil_all_but(self, used: Tensor) -> None:
        spoiled = torch.ones(len(self.flat), dtype=torch.bool, device=self.flat.device)
        spoiled[used.long()] = False
        base = self.pool.base
        row = self.pool.row_stride
        if self.pool.scale_stride == 8:
            channels = base[:, : row * self.pool.page_rows].view(len(base), -1, row)
            channels[spoiled.view(len(base), -1)] = 255
        else:
            base.view(-1, row)[spoiled] = float("nan") if base.element_size() != 1 else 255


def store(encoding: str, pages: int, rows: int, device: str) -> Store:
    wide = torch.randn(pages, rows, WIDTH, device=device)
    if encoding == "plain":
        base = wide.bfloat16()
        return Store(pool_of(base, WIDTH, ROPE), base.float().view(-1, WIDTH))
    packed = encode_rows(wide, FORMAT)
    flat = decode_rows(packed, FORMAT, torch.float32).reshape(-1, WIDTH)
    if encoding == "packed":
        return Store(pool_of(packed, WIDTH, ROPE), flat)
    cut = WIDTH + ROPE
    pad = torch.full((pages, 40), 255, dtype=torch.uint8, device=device)
    parts = [packed[..., :cut].flatten(1), packed[..., cut:].flatten(1), pad]
    return Store(planar_pool(torch.cat(parts, dim=1), rows, WIDTH, ROPE), flat)


def turn_tables(device: str) -> Turn:
    angles = torch.rand(4096, ROPE // 2, device=device) * 6
    return Turn(angles.cos(), angles.sin())


def wanted(rows: Rows, keys: list[Tensor], turn: Turn | None) -> Tensor:
    """The twin's answer, row by row, and its trailing channels turned back."""
    results = []
    for n, own in enumerate(keys):
        one = sparse_attention(
            rows.q[n : n + 1].float(), rows.sinks, [KeyBlock(own[None], None)], rows.scale, FAST
        )[0]
        place = max(int(rows.positions[n]), 0)
        if turn is not None:
            cos, sin = turn.cos[place], turn.sin[place]
            even, odd = one[:, WIDTH - ROPE :: 2].clone(), one[:, WIDTH - ROPE + 1 :: 2].clone()
            one[:, WIDTH - ROPE :: 2] = even * cos + odd * sin
            one[:, WIDTH - ROPE + 1 :: 2] = odd * cos - even * sin
        results.append(one)
    return torch.stack(results)


def random_rows(positions: list[int], heads: int, device: str) -> Rows:
    q = torch.randn(len(positions), heads, WIDTH, device=device).bfloat16()
    out = torch.full_like(q, float("nan"))
    sinks = torch.randn(heads, device=device)
    return Rows(q, out, sinks, ints(positions, device), WIDTH**-0.5)


def ints(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ring_of(positions: list[int], device: str) -> tuple[Ring, list[Tensor]]:
    """A ring for each sequence, in mixed slots, and each sequence's window."""
    count = len(positions)
    slots = torch.randperm(count).to(device=device, dtype=torch.int32)
    base = torch.randn(count, WINDOW, WIDTH, device=device).bfloat16()
    windows = []
    for n, position in enumerate(positions):
        ring = base[int(slots[n])]
        ring[max(position + 1, 0) :] = float("nan")
        windows.append(ring[: min(max(position + 1, 0), WINDOW)].float())
    return Ring(base, slots), windows


def check(rows: Rows, got: Tensor, want: Tensor) -> None:
    assert torch.isfinite(got).all()
    for n, position in enumerate(rows.positions.tolist()):
        if position < 0:
            assert not got[n].any()
        else:
            error = (got[n].float() - want[n]).norm() / want[n].norm()
            assert error < 6e-3, (n, position, float(error))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_decode_reads_its_window_and_its_chosen_rows_only(
    encoding: str, plan: Plan, device: str
) -> None:
    positions, heads, limit = [0, -1, 31, 200, 77], 10, 40
    rows = random_rows(positions, heads, device)
    ring, windows = ring_of(positions, device)
    rest = store(encoding, 7, 16, device)
    index = torch.full((len(positions), limit), -1)
    index[2, :3] = torch.tensor([5, 6, 111])
    index[3] = torch.randperm(112)[:limit].sort().values
    index[3, 7:9] = -1
    index[4, 33:35] = torch.tensor([8, 99])
    index = index.to(device=device, dtype=torch.int32)
    rest.spoil_all_but(index[index >= 0])
    keys = [
        torch.cat([near, rest.flat[listed[listed >= 0].long()]])
        for near, listed in zip(windows, index, strict=True)
    ]
    turn = turn_tables(device)
    got = decode_attention(
        rows, ring, Listed(rest.pool, index), turn, window_keys=WINDOW, plan=plan
    )
    check(rows, got, wanted(rows, keys, turn))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_decode_reads_every_visible_row_through_its_page_table(
    encoding: str, plan: Plan, device: str
) -> None:
    """Groups of 4 tokens, 2 rows a page: how many rows are visible follows from the position."""
    positions, heads, pages = [3, -1, 0, 130, 8], 16, 40
    rows = random_rows(positions, heads, device)
    ring, windows = ring_of(positions, device)
    rest = store(encoding, pages, 2, device)
    table = torch.full((len(positions), 20), 1 << 29)  # nobody looks past the pages in use
    order, used, keys = torch.randperm(pages), [], []
    for n, position in enumerate(positions):
        visible = (position + 1) // 4
        needed = -(-visible // 2)
        table[n, :needed], order = order[:needed], order[needed:]
        flat = (table[n, :needed, None] * 2 + torch.arange(2)).flatten()[:visible].to(device)
        used.append(flat)
        keys.append(torch.cat([windows[n], rest.flat[flat]]))
    rest.spoil_all_but(torch.cat(used))
    table = table.to(device=device, dtype=torch.int32)
    got = decode_attention(
        rows, ring, Visible(rest.pool, table, 4), None, window_keys=WINDOW, plan=plan
    )
    check(rows, got, wanted(rows, keys, None))


@pytest.mark.parametrize("kind", ["window only", "chosen", "visible"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_prefill_rows_of_several_sequences(encoding: str, kind: str, device: str) -> None:
    """Sequence 0 runs from position 0, sequence 1 resumes at 40 with its window before it."""
    positions = [0, 1, 2, 40, 41, -1]
    sequence = ints([0, 0, 0, 1, 1, 0], device)
    own = ints([0, 1, 2, 3 + 31, 3 + 32, 0], device)
    rows = random_rows(positions, 12, device)
    base = torch.randn(3 + 31 + 2 + 1, WIDTH, device=device).bfloat16()
    base[-1] = float("nan")
    windows = [
        base[int(at) + 1 - min(max(p + 1, 0), WINDOW) : int(at) + 1].float() if p >= 0 else base[:0]
        for p, at in zip(positions, own, strict=True)
    ]
    rest = store(encoding, 10, 2, device)
    table = ints([7, 9, 0, 1, 2, 3, 4, 5], device).view(2, 4)[:, :4]
    far = [torch.zeros(0, dtype=torch.long, device=device)] * len(positions)
    chosen: Listed | Visible | None = None
    if kind == "chosen":
        index = torch.full((len(positions), 20), -1, dtype=torch.int32)
        index[1, :2], index[3, 4:6], index[4, 19] = ints([3, 4], "cpu"), ints([0, 19], "cpu"), 11
        index = index.to(device)
        far = [listed[listed >= 0].long() for listed in index]
        chosen = Listed(rest.pool, index)
    elif kind == "visible":
        flat = (table[:, :, None].long() * 2 + torch.arange(2, device=device)).flatten(1)
        far = [flat[s, : (p + 1) // 8] for p, s in zip(positions, sequence.tolist(), strict=True)]
        chosen = Visible(rest.pool, table, 8, sequence)
    rest.spoil_all_but(torch.cat(far))
    keys = [torch.cat([near.float(), rest.flat[at]]) for near, at in zip(windows, far, strict=True)]
    turn = turn_tables(device)
    got = prefill_attention(rows, Span(base, own), chosen, turn, window_keys=WINDOW)
    check(rows, got, wanted(rows, keys, turn))


@pytest.mark.parametrize(
    ("channels", "parts"), [(448, (256, 128, 64)), (48, (16, 16, 16)), (112, (64, 32, 16))]
)
def test_quantised_channels_are_cut_into_powers_of_two(
    channels: int, parts: tuple[int, int, int]
) -> None:
    assert packed_parts(channels) == parts


def test_an_odd_number_of_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="33 quantised channels"):
        packed_parts(33)
