# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""Choosing each row's experts from parts of its router logits; twin: ``kernels.routing``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlease.kernels.gpu.early import early_launch, wait_for_inputs
from kvlease.kernels.gpu.step_rows import Projected, add_parts
from kvlease.kernels.routing import Scoring


@triton.jit
def _scores(logits, inside, SCORING: tl.constexpr):
    if SCORING == "softmax":
        weights = tl.where(inside, tl.exp(logits - tl.max(tl.where(inside, logits, -1e30))), 0.0)
        return weights / tl.sum(weights)
    elif SCORING == "sigmoid":
        return tl.sigmoid(logits)
    else:
        smooth = tl.log(1.0 + tl.exp(tl.minimum(logits, 20.0)))
        # for small e the sum 1 + e rounds: log(1 + e) is e - e * e / 2 there
        small = tl.exp(tl.minimum(logits, 20.0))
        smooth = tl.where(small < 1e-3, small - small * small * 0.5, smooth)
        return tl.sqrt(tl.where(logits > 20.0, logits, smooth))


@triton.jit
def _route(
    logits, tokens, table, bias, chosen, weights, dense, scale, E: tl.constexpr, BE: tl.constexpr,
    K: tl.constexpr, PARTS: tl.constexpr, SCORING: tl.constexpr, HASH: tl.constexpr,
    SHARED: tl.constexpr, SLOTS: tl.constexpr, FINE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write row n's experts and weights, and its line of the dense matrix."""
    wait_for_inputs(EARLY)
    n = tl.program_id(0)
    experts = tl.arange(0, BE)
    inside = experts < E
    logit = add_parts(logits, n, experts, inside, PARTS)
    if FINE:
        logit += add_parts(logits, n, E + experts, inside, PARTS)
    scores = _scores(logit, inside, SCORING)
    left = tl.full((BE,), -float("inf"), tl.float32)
    token = tl.load(tokens + n).to(tl.int64)
    if not HASH:
        left = tl.where(inside, scores + tl.load(bias + experts, mask=inside, other=0.0), left)
    slots = tl.arange(0, SLOTS)
    picks = tl.full((SLOTS,), E, tl.int32)
    shares = tl.where(slots == K, 1.0, tl.zeros((SLOTS,), tl.float32))
    total = 0.0
    for k in range(K):
        if HASH:
            pick = tl.load(table + token * K + k).to(tl.int32)
        else:
            best = tl.max(left)
            # the lowest of equals
            pick = tl.min(tl.where(left == best, experts, BE))
            left = tl.where(experts == pick, -float("inf"), left)
        score = tl.sum(tl.where(experts == pick, scores, 0.0))
        total += score
        picks = tl.where(slots == k, pick, picks)
        shares = tl.where(slots == k, score, shares)
    shares = tl.where(slots < K, shares / (total + 1e-20) * scale, shares)
    WIDE: tl.constexpr = K + SHARED
    tl.store(chosen + n * WIDE + slots, picks, mask=slots < WIDE)
    tl.store(weights + n * WIDE + slots, shares, mask=slots < WIDE)
    line = tl.sum(tl.where(experts[:, None] == picks[None, :], shares[None, :], 0.0), axis=1)
    if SHARED:
        line = tl.where(experts == E, 1.0, line)
    tl.store(dense + n * (E + SHARED) + experts, line, mask=experts < E + SHARED)


def route_rows(
    logits: Projected,
    tokens: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    num_experts: int,
    num_chosen: int,
    scoring: Scoring,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return experts [N, K + 1], their weights, and the dense weights [N, E + 1]; last: the shared.

    Shapes: logits parts of [N, 2 * E], coarse and fine ones to be added, or of [N, E]; tokens [N];
    table [V, K] or bias [E].
    """
    values = logits.parts
    num_rows = values.shape[1]
    wide = num_chosen + 1
    chosen = values.new_empty((num_rows, wide), dtype=torch.int32)
    weights = values.new_empty((num_rows, wide), dtype=torch.float32)
    dense = values.new_empty((num_rows, num_experts + 1), dtype=torch.float32)
    _route[(num_rows,)](
        logits, tokens, table, bias, chosen, weights, dense, scale, E=num_experts,
        BE=triton.next_power_of_2(num_experts + 1), K=num_chosen, PARTS=values.shape[0],
        SCORING=scoring, HASH=table is not None, SHARED=1, SLOTS=triton.next_power_of_2(wide),
        FINE=values.shape[2] > num_experts, **early_launch(_route), num_warps=1,
    )  # fmt: skip
    return chosen, weights, dense


def pack_router(router: Tensor) -> Tensor:
    """Return a router's weights [E, D] as coarse and fine bf16 parts, [2 * E, D]."""
    coarse = router.bfloat16()
    return torch.cat([coarse, (router - coarse.to(router.dtype)).bfloat16()])
