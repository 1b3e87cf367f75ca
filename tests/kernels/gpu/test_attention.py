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
    Pool,
    Ring,
    Rows,
    Span,
    Visible,
    packed_parts,
    planar_pool,
    pool_of,
)
from kvlease.kernels.gpu.attention_plan import Plan
from kvlease.kernels.gpu.decode_attention import decode_attention
from kvlease.kernels.gpu.prefill_attention import prefill_attention
from kvlease.kernels.tiling import FAST
from kvlease.protocols.schema import RowFormat

ENCODINGS = ["plain", "packed", "planar"]


@frozen
class Size:
    """Channels of a row, those with RoPE, keys of a window, heads, and a plan or the default."""

    width: int
    rope: int
    window: int
    heads: int
    plan: Plan | None


def full_size(heads: int, plan: Plan | None) -> object:
    """A size that only a device is fast enough for."""
    name = f"{heads} heads, {plan.schedule} {plan.splits}" if plan else f"{heads} heads"
    return pytest.param(Size(512, 64, 128, heads, plan), marks=pytest.mark.gpu, id=name)


SIZES = [
    pytest.param(Size(64, 16, 32, 10, Plan(16, 32, 1, 4)), id="one share"),
    pytest.param(Size(64, 16, 32, 10, Plan(16, 16, 3, 4)), id="three shares"),
    full_size(64, None),
    full_size(64, Plan(64, 64, 3, 8, schedule="wide")),
]


@pytest.fixture(autouse=True)
def _needs_a_device(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


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


def store(encoding: str, pages: int, rows: int, size: Size, device: str) -> Store:
    width, rope = size.width, size.rope
    wide = torch.randn(pages, rows, width, device=device)
    if encoding == "plain":
        base = wide.bfloat16()
        return Store(pool_of(base, width, rope), base.float().view(-1, width))
    form = RowFormat("fp8_latent", width, rope)
    packed = encode_rows(wide, form)
    flat = decode_rows(packed, form, torch.float32).reshape(-1, width)
    if encoding == "packed":
        return Store(pool_of(packed, width, rope), flat)
    cut = width + rope
    pad = torch.full((pages, 48), 255, dtype=torch.uint8, device=device)
    parts = [packed[..., :cut].flatten(1), packed[..., cut:].flatten(1), pad]
    return Store(planar_pool(torch.cat(parts, dim=1), rows, width, rope), flat)


def turn_tables(size: Size, device: str) -> Turn:
    angles = torch.rand(4096, size.rope // 2, device=device) * 6
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
            tail = one[:, one.shape[1] - 2 * len(cos) :]
            even, odd = tail[:, ::2].clone(), tail[:, 1::2].clone()
            tail[:, ::2] = even * cos + odd * sin
            tail[:, 1::2] = odd * cos - even * sin
        results.append(one)
    return torch.stack(results)


def random_rows(positions: list[int], size: Size, device: str) -> Rows:
    q = torch.randn(len(positions), size.heads, size.width, device=device).bfloat16()
    out = torch.full_like(q, float("nan"))
    sinks = torch.randn(size.heads, device=device)
    return Rows(q, out, sinks, ints(positions, device), size.width**-0.5)


def ints(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ring_of(positions: list[int], size: Size, device: str) -> tuple[Ring, list[Tensor]]:
    """A ring for each sequence, in mixed slots, and each sequence's window."""
    count = len(positions)
    slots = torch.randperm(count).to(device=device, dtype=torch.int32)
    base = torch.randn(count, size.window, size.width, device=device).bfloat16()
    windows = []
    for n, position in enumerate(positions):
        ring = base[int(slots[n])]
        ring[max(position + 1, 0) :] = float("nan")
        windows.append(ring[: min(max(position + 1, 0), size.window)].float())
    return Ring(base, slots), windows


def check(rows: Rows, got: Tensor, want: Tensor) -> None:
    assert torch.isfinite(got).all()
    for n, position in enumerate(rows.positions.tolist()):
        if position < 0:
            assert not got[n].any()
        else:
            error = (got[n].float() - want[n]).norm() / want[n].norm()
            assert error < 6e-3, (n, position, float(error))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_decode_reads_its_window_and_its_chosen_rows_only(
    encoding: str, size: Size, device: str
) -> None:
    positions, limit = [0, -1, 31, 200, 77], 40
    rows = random_rows(positions, size, device)
    ring, windows = ring_of(positions, size, device)
    rest = store(encoding, 7, 16, size, device)
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
    turn = turn_tables(size, device)
    got = decode_attention(
        rows, ring, Listed(rest.pool, index), turn, window_keys=size.window, plan=size.plan
    )
    check(rows, got, wanted(rows, keys, turn))


@pytest.mark.parametrize("size", SIZES)
def test_logits_may_rise_steeply_from_tile_to_tile(size: Size, device: str) -> None:
    """Later rows are forty times as long: weights relative to an earlier peak would overflow."""
    positions, limit = [200, 77], 96
    rows = random_rows(positions, size, device)
    ring, windows = ring_of(positions, size, device)
    rest = store("plain", 8, 24, size, device)
    index = torch.stack([torch.arange(limit), torch.arange(limit) + limit])
    index = index.to(device=device, dtype=torch.int32)
    for listed in index[:, limit - 20 :].long():
        rest.pool.base.view(-1, size.width)[listed] *= 40
        rest.flat[listed] = rest.pool.base.view(-1, size.width)[listed].float()
    keys = [
        torch.cat([near, rest.flat[listed.long()]])
        for near, listed in zip(windows, index, strict=True)
    ]
    chosen = Listed(rest.pool, index)
    got = decode_attention(rows, ring, chosen, window_keys=size.window, plan=size.plan)
    check(rows, got, wanted(rows, keys, None))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_decode_reads_every_visible_row_through_its_page_table(
    encoding: str, size: Size, device: str
) -> None:
    """Groups of 4 tokens, 2 rows a page: how many rows are visible follows from the position."""
    positions, pages = [3, -1, 0, 130, 8], 40
    rows = random_rows(positions, size, device)
    ring, windows = ring_of(positions, size, device)
    rest = store(encoding, pages, 2, size, device)
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
        rows, ring, Visible(rest.pool, table, 4), None, window_keys=size.window, plan=size.plan
    )
    check(rows, got, wanted(rows, keys, None))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_more_shares_than_processors(encoding: str, splits: int, device: str) -> None:
    """A program takes one share after the other: long ones, short ones, and none at all."""
    size = Size(512, 64, 128, 64, Plan(64, 64, splits, 8, schedule="wide"))
    positions = [(n * 37) % 400 - 1 for n in range(300)]
    rows = random_rows(positions, size, device)
    ring, windows = ring_of(positions, size, device)
    rest = store(encoding, 40, 16, size, device)
    index = torch.randint(0, 640, (len(positions), 100), device=device).to(torch.int32)
    index[torch.rand(index.shape, device=device) < 0.2] = -1
    index[::7] = -1
    keys = [
        torch.cat([near, rest.flat[listed[listed >= 0].long()]])
        for near, listed in zip(windows, index, strict=True)
    ]
    turn = turn_tables(size, device)
    got = decode_attention(rows, ring, Listed(rest.pool, index), turn, plan=size.plan)
    check(rows, got, wanted(rows, keys, turn))


PREFILL_SIZES = [
    pytest.param(Size(64, 16, 32, 12, None), id="small"),
    full_size(128, None),
]


@pytest.mark.parametrize("kind", ["window only", "chosen", "visible"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("size", PREFILL_SIZES)
def test_prefill_rows_of_several_sequences(
    encoding: str, kind: str, size: Size, device: str
) -> None:
    """Sequence 0 runs from position 0, sequence 1 resumes with its window before it."""
    before = size.window - 1
    positions = [0, 1, 2, before + 9, before + 10, -1]
    sequence = ints([0, 0, 0, 1, 1, 0], device)
    own = ints([0, 1, 2, 3 + before, 4 + before, 0], device)
    rows = random_rows(positions, size, device)
    base = torch.randn(3 + before + 3, size.width, device=device).bfloat16()
    base[-1] = float("nan")
    windows = [
        base[int(at) + 1 - min(p + 1, size.window) : int(at) + 1].float() if p >= 0 else base[:0]
        for p, at in zip(positions, own, strict=True)
    ]
    rest = store(encoding, 10, 2, size, device)
    table = ints([7, 9, 0, 1, 2, 3, 4, 5], device).view(2, 4)
    far = [torch.zeros(0, dtype=torch.long, device=device)] * len(positions)
    chosen: Listed | Visible | None = None
    if kind == "chosen":
        index = torch.full((len(positions), 20), -1, dtype=torch.int32)
        index[1, :2], index[3, 4:6], index[4, 19] = ints([3, 4], "cpu"), ints([0, 19], "cpu"), 11
        index = index.to(device)
        far = [listed[listed >= 0].long() for listed in index]
        chosen = Listed(rest.pool, index)
    elif kind == "visible":
        ratio = (before + 11) // 6  # at most 6 of the 8 rows in a sequence's pages are visible
        flat = (table[:, :, None].long() * 2 + torch.arange(2, device=device)).flatten(1)
        far = [
            flat[s, : (p + 1) // ratio] for p, s in zip(positions, sequence.tolist(), strict=True)
        ]
        chosen = Visible(rest.pool, table, ratio, sequence)
    rest.spoil_all_but(torch.cat(far))
    keys = [torch.cat([near.float(), rest.flat[at]]) for near, at in zip(windows, far, strict=True)]
    turn = turn_tables(size, device)
    span = Span(base, own)
    got = prefill_attention(rows, span, chosen, turn, window_keys=size.window, plan=size.plan)
    check(rows, got, wanted(rows, keys, turn))


@pytest.mark.parametrize(
    ("channels", "parts"), [(448, (256, 128, 64)), (48, (16, 16, 16)), (112, (64, 32, 16))]
)
def test_quantised_channels_are_cut_into_powers_of_two(
    channels: int, parts: tuple[int, int, int]
) -> None:
    assert packed_parts(channels) == parts


def test_pages_that_lie_askew_are_refused(device: str) -> None:
    """A row that starts at an odd place could not be read 16 bytes at a time."""
    pool = planar_pool(torch.zeros(3, 1000, dtype=torch.uint8, device=device), 4, 64, 16)
    with pytest.raises(ValueError, match="pages 1000 bytes apart"):
        pool.paged  # noqa: B018 - asking is the test


def test_an_odd_number_of_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="33 quantised channels"):
        packed_parts(33)
