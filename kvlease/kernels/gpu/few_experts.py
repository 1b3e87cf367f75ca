# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""A mixture of experts for few rows: each expert that any row chose is read once.

Every row meets every such expert with its own weight, zero where it did not choose it: reading an
expert takes longer than multiplying it with all rows. Twin: ``kernels.moe``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlease.kernels.gpu.early import early_launch, fetch_lines, wait_for_inputs
from kvlease.kernels.gpu.few_rows import rows_side
from kvlease.kernels.moe import ExpertWeights


@triton.jit(do_not_specialize=["num_rows"])
def _up(
    rows, dense, gate, up, out, num_rows, limit, E: tl.constexpr, D: tl.constexpr, F: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write BN channels of one expert's weighted hidden rows, out [E, N, F]."""
    expert = tl.program_id(1)
    lanes = tl.arange(0, BM)
    real = lanes < num_rows
    channels = tl.program_id(0) * BN + tl.arange(0, BN)
    begin = (expert * F + channels).to(tl.int64) * D
    fetch_lines(gate + begin, channels < F, LINES, EARLY)
    fetch_lines(up + begin, channels < F, LINES, EARLY)
    wait_for_inputs(EARLY)
    share = tl.load(dense + lanes * E + expert, mask=real, other=0.0)
    if tl.max(tl.abs(share)) > 0.0:
        deep = tl.arange(0, BK)
        first = tl.zeros((BN, BM), tl.float32)
        second = tl.zeros((BN, BM), tl.float32)
        inside = (channels < F)[:, None]
        at = begin[:, None] + deep[None, :]
        vector = rows + lanes.to(tl.int64)[:, None] * D + deep[None, :]
        for k in tl.range(0, D, BK, num_stages=STAGES):
            within = (deep + k < D)[None, :]
            x = tl.load(vector + k, mask=real[:, None] & within, other=0.0)
            a = tl.load(
                gate + at + k, mask=inside & within, other=0.0, eviction_policy="evict_first"
            )
            first = tl.dot(a, x.T, first)
            b = tl.load(up + at + k, mask=inside & within, other=0.0, eviction_policy="evict_first")
            second = tl.dot(b, x.T, second)
        first = tl.minimum(first, limit)
        second = tl.minimum(tl.maximum(second, -limit), limit)
        hidden = first / (1.0 + tl.exp(-first)) * second * share[None, :]
        where = (expert * num_rows + lanes).to(tl.int64)[None, :] * F + channels[:, None]
        tl.store(out + where, hidden.to(tl.bfloat16), mask=inside & real[None, :])


@triton.jit
def _chosen(dense, lanes, real, E: tl.constexpr, BE: tl.constexpr):
    """Return how many experts any row chose, and their numbers in ascending order, 4 bits each."""
    experts = tl.arange(0, BE)
    inside = real[:, None] & (experts < E)[None, :]
    shares = tl.load(dense + lanes[:, None] * E + experts[None, :], mask=inside, other=0.0)
    is_chosen = (tl.max(tl.abs(shares), axis=0) > 0.0).to(tl.int32)
    place = tl.cumsum(is_chosen, 0) - 1
    numbers = experts.to(tl.int64) << (4 * tl.maximum(place, 0)).to(tl.int64)
    return tl.sum(is_chosen), tl.sum(tl.where(is_chosen > 0, numbers, 0))


@triton.jit(do_not_specialize=["num_rows"])
def _down(
    hidden, dense, down, out, num_rows, E: tl.constexpr, BE: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SHARES: tl.constexpr,
    STAGES: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write BN channels of one share of the sum over all chosen experts, out [SHARES, N, D]."""
    share = tl.program_id(1)
    lanes = tl.arange(0, BM)
    real = lanes < num_rows
    channels = tl.program_id(0) * BN + tl.arange(0, BN)
    deep = tl.arange(0, BK)
    inside = (channels < D)[:, None]
    total = tl.zeros((BN, BM), tl.float32)
    begin = channels.to(tl.int64) * (E * F)
    fetch_lines(down + begin + share * (E * F // SHARES), channels < D, LINES, EARLY)
    wait_for_inputs(EARLY)
    count, chosen = _chosen(dense, lanes, real, E, BE)
    STEPS: tl.constexpr = (F + BK - 1) // BK
    each = (count * STEPS + SHARES - 1) // SHARES
    first = share * each
    for step in tl.range(first, tl.minimum(first + each, count * STEPS), num_stages=STAGES):
        expert = ((chosen >> (step // STEPS * 4)) & 15).to(tl.int32)
        k = step % STEPS * BK
        within = (deep + k < F)[None, :]
        at = expert * num_rows + lanes
        vector = hidden + at.to(tl.int64)[:, None] * F + deep[None, :] + k
        x = tl.load(vector, mask=real[:, None] & within, other=0.0)
        matrix = down + begin[:, None] + expert * F + deep[None, :] + k
        w = tl.load(matrix, mask=inside & within, other=0.0, eviction_policy="evict_first")
        total = tl.dot(w, x.T, total)
    where = (share * num_rows + lanes).to(tl.int64)[None, :] * D + channels[:, None]
    tl.store(out + where, total, mask=inside & real[None, :])


def mix_few(rows: Tensor, dense: Tensor, weights: ExpertWeights, limit: float) -> Tensor:
    """Return the weighted sum of the experts' outputs, as parts to be added.

    Shapes: rows [N, D] bf16, N up to 128; dense [N, E] float32, E up to 16; result [shares, N, D]
    float32.
    """
    num_rows, width = rows.shape
    experts, hidden = weights.num_experts, weights.width
    side = rows_side(num_rows)
    inner = rows.new_empty((experts, num_rows, hidden))
    tall, step = min(64, triton.next_power_of_2(hidden)), min(64, triton.next_power_of_2(width))
    warps, stages = {64: (4, 3), 128: (8, 4)}.get(side, (4, 5))
    _up[(triton.cdiv(hidden, tall), experts)](
        rows, dense, weights.gate, weights.up, inner, num_rows, limit, E=experts, D=width,
        F=hidden, BM=side, BN=tall, BK=step, STAGES=stages,
        LINES=min(4, step // 16), num_warps=warps, **early_launch(_up),
    )  # fmt: skip
    shares = min(4, experts)
    out = rows.new_empty((shares, num_rows, width), dtype=torch.float32)
    tall, deep = min(64, triton.next_power_of_2(width)), triton.next_power_of_2(hidden)
    step = min(128 if side < 64 else 64, deep)
    warps, stages = {64: (4, 6), 128: (8, 4)}.get(side, (4, 5))
    _down[(triton.cdiv(width, tall), shares)](
        inner, dense, weights.down, out, num_rows, E=experts, BE=triton.next_power_of_2(experts),
        D=width, F=hidden, BM=side, BN=tall, BK=step, SHARES=shares, STAGES=stages,
        LINES=min(8, step // 16), num_warps=warps, **early_launch(_down),
    )  # fmt: skip
    return out
