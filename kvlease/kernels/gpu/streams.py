# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportGeneralTypeIssues=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""Residual streams around a block, in two launches; the twin is ``kernels.mhc``.

The first launch leaves the block before (or spreads a token's embedding), writes the streams, and
multiplies them with the mixer's projection (which the library does where rows are many); the second
sums up, normalises and mixes. The streams are bf16, so the projection needs no float32 product:
each weight is held as a bf16 number and what that one left over, and both meet the streams exactly.
"""

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.early import (
    early_launch,
    wait_for_inputs,
)
from kvlease.kernels.gpu.products import float32_product
from kvlease.kernels.mhc import MixerNumbers, MixerWeights

_FEW = 64
"""Up to so many rows, programs share a row's channels out: there would be too few otherwise."""


@frozen
class PackedMixer:
    """A mixer's weights for the device.

    Attributes:
        projection: [S * D, columns] bf16: each output's weights, then what rounding them left.
        scale, base: [outputs] float32.
    """

    projection: Tensor
    scale: Tensor
    base: Tensor

    @property
    def outputs(self) -> int:
        """Numbers that the projection gives for a row."""
        return self.base.shape[0]


@frozen
class BlockOutput:
    """What a block gives back, as P parts to be added: values [P, N, D], any strides but one."""

    values: Tensor


@frozen
class Mixed:
    """Streams after a leave: streams [N, S, D], and what the next enter needs of them.

    sums [shares, N, columns] and squares [shares, N] are parts of the projection and of the
    streams' squared length, float32.
    """

    streams: Tensor
    sums: Tensor
    squares: Tensor


def pack_mixer(weights: MixerWeights) -> PackedMixer:
    """Return the weights as the kernels take them."""
    coarse = weights.projection.bfloat16()
    fine = (weights.projection - coarse.float()).bfloat16()
    both = torch.cat([coarse, fine])
    columns = max(16, triton.next_power_of_2(len(both)))
    padded = both.new_zeros((columns, both.shape[1]))
    padded[: len(both)] = both
    return PackedMixer(padded.t().contiguous(), weights.scale.float(), weights.base.float())


@triton.jit
def _added(
    streams, tokens, added, rows, real, channels, exists, part, row, D: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Return what the block before gave, or the tokens' embedding, [R, C] float32."""
    inside = real[:, None] & exists[None, :]
    if PARTS == 0:
        token = tl.load(tokens + rows, mask=real, other=0).to(tl.int64)
        at = streams + token[:, None] * D + channels[None, :]
        block = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        start = added + rows.to(tl.int64)[:, None] * row + channels[None, :]
        block = tl.load(start, mask=inside, other=0.0).to(tl.float32)
        for p in tl.static_range(1, PARTS):
            block += tl.load(start + p * part, mask=inside, other=0.0).to(tl.float32)
    return block


@triton.jit(do_not_specialize=["num_rows"])
def _project(
    streams, tokens, added, mixing, result, projection, sums, squares, num_rows, part, row,
    D: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write BM rows of new streams over BD channels, and their part of the projection."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    share = tl.program_id(1)
    real = rows < num_rows
    columns = tl.arange(0, COLUMNS)
    channels = share * BD + tl.arange(0, BD)
    exists = channels < D
    inside = real[:, None] & exists[None, :]
    first = rows.to(tl.int64)[:, None] * (S * D) + channels[None, :]
    # all that is read is asked for before any of it is used, the weights first of all
    matrices = ()
    for s in tl.static_range(S):
        at = projection + (s * D + channels)[:, None] * COLUMNS + columns[None, :]
        matrices += (tl.load(at, mask=exists[:, None], other=0.0),)
    wait_for_inputs(EARLY)
    olds = ()
    mixes = ()
    if PARTS > 0:
        for t in tl.static_range(S):
            olds += (tl.load(streams + first + t * D, mask=inside, other=0.0),)
        for m in tl.static_range(S + S * S):
            mixes += (tl.load(mixing + rows * (S + S * S) + m, mask=real, other=0.0),)
    block = _added(streams, tokens, added, rows, real, channels, exists, part, row, D, PARTS)
    # columns are the instruction's long side: its operands lie in shared memory, so that streams
    # are not made once for the product and once more to be stored
    total = tl.zeros((COLUMNS, BM), tl.float32)
    square = tl.zeros((BM,), tl.float32)
    for s in tl.static_range(S):
        x = block
        if PARTS > 0:
            x *= mixes[s][:, None]
            for t in tl.static_range(S):
                x += mixes[S + t * S + s][:, None] * olds[t].to(tl.float32)
        x = x.to(tl.bfloat16)
        tl.store(result + first + s * D, x, mask=inside)
        length = x.to(tl.float32)
        square += tl.sum(length * length, axis=1)
        total = tl.dot(matrices[s].T, x.T, total)
    at = (share * num_rows + rows).to(tl.int64)
    tl.store(sums + at[None, :] * COLUMNS + columns[:, None], total, mask=real[None, :])
    tl.store(squares + at, square, mask=real)


@triton.jit
def _leave(
    streams, tokens, added, mixing, result, squares, part, row, D: tl.constexpr, S: tl.constexpr,
    PARTS: tl.constexpr, BD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write row n of the new streams, and their squared length."""
    wait_for_inputs(EARLY)
    rows = tl.program_id(0) + tl.arange(0, 1)
    real = rows >= 0
    channels = tl.arange(0, BD)
    exists = channels < D
    first = rows.to(tl.int64)[:, None] * (S * D) + channels[None, :]
    weights = rows * (S + S * S)
    # all that is read is asked for before any of it is used
    olds = ()
    if PARTS > 0:
        for t in tl.static_range(S):
            olds += (tl.load(streams + first + t * D, mask=exists[None, :], other=0.0),)
    block = _added(streams, tokens, added, rows, real, channels, exists, part, row, D, PARTS)
    square = tl.zeros((1,), tl.float32)
    for s in tl.static_range(S):
        x = block
        if PARTS > 0:
            x *= tl.load(mixing + weights + s)[:, None]
            for t in tl.static_range(S):
                x += tl.load(mixing + weights + S + t * S + s)[:, None] * olds[t].to(tl.float32)
        x = x.to(tl.bfloat16)
        tl.store(result + first + s * D, x, mask=exists[None, :])
        length = x.to(tl.float32)
        square += tl.sum(length * length, axis=1)
    tl.store(squares + rows, square)


@triton.jit
def _mixes(
    sums, squares, scale, base, rows, num_rows, index, norm_eps, WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Return outputs number ``index`` of the rows' projections, scaled and shifted, [R, I]."""
    real = (rows < num_rows)[None, :]
    at = tl.arange(0, SHARES)[:, None] * num_rows + rows[None, :]
    length = tl.sum(tl.load(squares + at, mask=real, other=1.0), axis=0)
    mine = sums + at.to(tl.int64)[:, :, None] * COLUMNS + index[None, None, :]
    real = real[:, :, None]
    value = tl.load(mine, mask=real, other=0.0) + tl.load(mine + OUTPUTS, mask=real, other=0.0)
    value = tl.sum(value, axis=0) * tl.rsqrt(length / WIDTH + norm_eps)[:, None]
    return value * tl.load(scale + index)[None, :] + tl.load(base + index)[None, :]


@triton.jit
def _balance(comb, eps, ITERATIONS: tl.constexpr):
    """Make each exp(comb) [R, S, S] nearly doubly stochastic."""
    comb = tl.exp(comb - tl.max(comb, axis=2)[:, :, None])
    comb = comb / tl.sum(comb, axis=2)[:, :, None] + eps
    comb = comb / (tl.sum(comb, axis=1) + eps)[:, None, :]
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, axis=2) + eps)[:, :, None]
        comb = comb / (tl.sum(comb, axis=1) + eps)[:, None, :]
    return comb


@triton.jit(do_not_specialize=["num_rows"])
def _enter(
    streams, sums, squares, scale, base, weight, hidden, mixing, num_rows, mixer_eps, norm_eps,
    D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, SHARES: tl.constexpr, ITERATIONS: tl.constexpr, BR: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program n < N writes row n's block input, normalised; those behind, how outputs go back."""
    n = tl.program_id(0)
    lanes = tl.arange(0, S)
    square = tl.arange(0, S * S)
    channels = tl.arange(0, BD)
    inside = channels < D
    if n < num_rows:
        # all that is read is asked for before any of it is used, the weights first of all
        norm = tl.load(weight + channels, mask=inside, other=0.0)
        wait_for_inputs(EARLY)
        at = n.to(tl.int64) * (S * D) + lanes[:, None] * D + channels[None, :]
        tile = tl.load(streams + at, mask=inside[None, :], other=0.0)
        gates = _mixes(
            sums, squares, scale, base, n + tl.arange(0, 1), num_rows, lanes, norm_eps, S * D,
            OUTPUTS, COLUMNS, SHARES,
        )  # fmt: skip
        pre = tl.sigmoid(tl.reshape(gates, (S,))) + mixer_eps
        x = tl.sum(pre[:, None] * tile.to(tl.float32), axis=0).to(tl.bfloat16).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x) / D + norm_eps)
        x *= norm
        tl.store(hidden + n.to(tl.int64) * D + channels, x.to(tl.bfloat16), mask=inside)
    elif OUTPUTS > S:
        wait_for_inputs(EARLY)
        rows = (n - num_rows) * BR + tl.arange(0, BR)
        real = (rows < num_rows)[:, None]
        into = mixing + rows[:, None] * (S + S * S)
        post = _mixes(
            sums, squares, scale, base, rows, num_rows, S + lanes, norm_eps, S * D, OUTPUTS,
            COLUMNS, SHARES,
        )  # fmt: skip
        mixes = _mixes(
            sums, squares, scale, base, rows, num_rows, 2 * S + square, norm_eps, S * D, OUTPUTS,
            COLUMNS, SHARES,
        )  # fmt: skip
        tl.store(into + lanes[None, :], tl.sigmoid(post) * 2.0, mask=real)
        comb = _balance(tl.reshape(mixes, (BR, S, S)), mixer_eps, ITERATIONS)
        tl.store(into + S + square[None, :], tl.reshape(comb, (BR, S * S)), mask=real)


def spread_tokens(embedding: Tensor, tokens: Tensor, streams: int, mixer: PackedMixer) -> Mixed:
    """Return streams that all hold their token's embedding, projected.

    Shapes: embedding [V, D] bf16; tokens [N] int32 or int64.
    """
    return _launch_project(embedding, tokens, None, None, mixer, (len(tokens), streams))


def leave_streams(
    streams: Tensor, output: BlockOutput, mixing: Tensor, mixer: PackedMixer
) -> Mixed:
    """Return the streams after a block, projected by the next block's mixer.

    Shapes: streams [N, S, D] bf16; mixing [N, S + S * S] float32 as `enter_streams` gives it.
    """
    return _launch_project(streams, None, output, mixing, mixer, streams.shape[:2])


def _launch_project(
    streams: Tensor,
    tokens: Tensor | None,
    output: BlockOutput | None,
    mixing: Tensor | None,
    mixer: PackedMixer,
    shape: tuple[int, ...],
) -> Mixed:
    (num_rows, lanes), width = shape, streams.shape[-1]
    columns = mixer.projection.shape[1]
    result = streams.new_empty((num_rows, lanes, width))
    added = None if output is None else output.values
    strides = (0, 0) if added is None else added.stride()[:2]
    common = {"D": width, "S": lanes, "PARTS": 0 if added is None else added.shape[0]}
    block = triton.next_power_of_2(width)
    if num_rows > _FEW:
        squares = result.new_empty((1, num_rows), dtype=torch.float32)
        _leave[(num_rows,)](
            streams, tokens, added, mixing, result, squares, *strides, BD=block,
            num_warps=8 if block >= 2048 else 4, **common, **early_launch(_leave),
        )  # fmt: skip
        sums = float32_product(result.flatten(1), mixer.projection).unsqueeze(0)
        return Mixed(result, sums, squares)
    block = min(64, block)
    shares = triton.next_power_of_2(triton.cdiv(width, block))
    sums = result.new_empty((shares, num_rows, columns), dtype=torch.float32)
    squares = result.new_empty((shares, num_rows), dtype=torch.float32)
    tall = 16 if num_rows <= 16 else 32
    _project[(triton.cdiv(num_rows, tall), shares)](
        streams, tokens, added, mixing, result, mixer.projection, sums, squares, num_rows,
        *strides, COLUMNS=columns, BM=tall, BD=block, num_warps=4, **common,
        **early_launch(_project),
    )  # fmt: skip
    return Mixed(result, sums, squares)


def enter_streams(
    mixed: Mixed, mixer: PackedMixer, weight: Tensor, numbers: MixerNumbers
) -> tuple[Tensor, Tensor]:
    """Return a block's input, normalised with ``weight`` [D], and how its output goes back.

    Shapes: input [N, D] bf16; mixing [N, S + S * S] float32: post, then comb by rows. The head's
    mixer only reads: its mixing is not written.
    """
    num_rows, lanes, width = mixed.streams.shape
    hidden = mixed.streams.new_empty((num_rows, width))
    mixing = mixed.sums.new_empty((num_rows, lanes + lanes * lanes))
    together = 1 if num_rows <= _FEW else 32
    mixed_by = triton.cdiv(num_rows, together) if mixer.outputs > lanes else 0
    block = triton.next_power_of_2(width)
    _enter[(num_rows + mixed_by,)](
        mixed.streams, mixed.sums, mixed.squares, mixer.scale, mixer.base, weight, hidden, mixing,
        num_rows, numbers.eps, numbers.norm_eps, D=width, BD=block, S=lanes,
        OUTPUTS=mixer.outputs, COLUMNS=mixer.projection.shape[1], SHARES=mixed.sums.shape[0],
        ITERATIONS=numbers.sinkhorn_iterations, BR=together,
        num_warps=8 if block >= 2048 and num_rows > _FEW else 4,
        **early_launch(_enter),
    )  # fmt: skip
    return hidden, mixing
