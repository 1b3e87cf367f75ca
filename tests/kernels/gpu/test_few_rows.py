"""Products, routing, experts and greedy choice of few rows, on the device against their twins."""

import pytest
import torch
from torch import Tensor

from kvlease.kernels.gpu.few_experts import mix_few
from kvlease.kernels.gpu.few_rows import multiply_few
from kvlease.kernels.gpu.greedy import Following, greedy_tokens
from kvlease.kernels.gpu.route_rows import pack_router, route_rows
from kvlease.kernels.gpu.step_rows import projected
from kvlease.kernels.moe import ExpertWeights, mix_experts
from kvlease.kernels.routing import (
    SCORES,
    Routing,
    Scoring,
    choose_by_score,
    choose_by_token,
    route,
)
from kvlease.kernels.tiling import FAST


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert torch.isfinite(got.float()).all()
    assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "groups", "outputs", "deep"), [(1, 1, 72, 96), (16, 3, 16, 640), (40, 1, 16500, 32)]
)
def test_products(
    rows: int, groups: int, outputs: int, deep: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(rows)
    wide = torch.randn(rows, groups * deep + 8, device=device).bfloat16()
    x = wide[:, : groups * deep]
    wide[:, groups * deep :] = torch.nan
    weight = torch.randn(groups, outputs, deep, device=device).bfloat16()
    got = multiply_few(x, weight if groups > 1 else weight[0], dtype=dtype)
    wanted = torch.einsum("ngk,gmk->ngm", x.float().view(rows, groups, deep), weight.float())
    close(got.float().sum(0), wanted.flatten(1), 5e-3 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "softmax", "sigmoid"])
def test_routing(scoring: Scoring, by_token: bool, device: str) -> None:
    torch.manual_seed(4)
    rows, width, experts, count = 7, 64, 11, 4
    x = torch.randn(rows, width, device=device).bfloat16()
    router = torch.randn(experts, width, device=device)
    router[5] = router[3]  # equal scores: the lower number wins
    bias = torch.randn(experts, device=device) * 0.1
    bias[5] = bias[3]
    table = torch.randint(experts, (9, count), device=device)
    tokens = torch.randint(9, (rows,), device=device)
    logits = projected(multiply_few(x, pack_router(router)))
    scores = SCORES[scoring](x.float() @ router.t())
    picked = choose_by_token(table, tokens) if by_token else choose_by_score(scores, bias, count)
    chosen, weights, dense = route_rows(
        logits, tokens, table if by_token else None, None if by_token else bias, experts, count,
        scoring, 1.5,
    )  # fmt: skip
    assert torch.equal(chosen[:, :count].long(), picked)
    assert (chosen[:, count] == experts).all()
    wanted = route(scores, picked, 1.5).weights
    close(dense[:, :experts], wanted, 1e-4)
    assert (dense[:, experts] == 1).all()
    assert (weights[:, count] == 1).all()
    close(weights[:, :count].sum(1), torch.full((rows,), 1.5, device=device), 1e-5)


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_experts(rows: int, device: str) -> None:
    """Experts that nobody chose are poison and must not be read."""
    torch.manual_seed(rows)
    width, hidden, experts = 64, 48, 6
    x = torch.randn(rows, width, device=device).bfloat16()
    gate, up = (torch.randn(experts, hidden, width, device=device) * 0.3 for _ in range(2))
    down = torch.randn(width, experts, hidden, device=device) * 0.1
    dense = torch.rand(rows, experts, device=device)
    dense[torch.rand(rows, experts, device=device) < 0.5] = 0
    dense[:, 1] = 0
    dense[:, 5] = 1

    def packed(poison: float) -> ExpertWeights:
        for part in (gate[1], up[1], down[:, 1]):
            part.fill_(poison)
        return ExpertWeights(
            gate.flatten(0, 1).bfloat16(), up.flatten(0, 1).bfloat16(),
            down.flatten(1).bfloat16(), experts,
        )  # fmt: skip

    wanted = mix_experts(x.float(), Routing(dense, dense > 0), _wide(packed(0.0)), 1.0, FAST)
    got = mix_few(x, dense, packed(torch.nan), 1.0)
    close(got.sum(0), wanted, 1e-2)


def _wide(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(
        weights.gate.float(), weights.up.float(), weights.down.float(), weights.num_experts
    )


def test_greedy_choice(device: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 9001, device=device).round(decimals=1)
    logits[1] = 0.0
    logits[2, 8999:] = 50.0
    logits[3, :5000] = -torch.inf
    assert torch.equal(greedy_tokens(logits).long(), logits.argmax(dim=1))


def test_the_tokens_drawn_are_the_next_step(device: str) -> None:
    """Rows at -1 are none: they stay as they are, and so does what lies beside."""
    logits = torch.randn(4, 300, device=device)
    numbers = torch.tensor([[7, -1, 0, 40, 9], [1, 2, 3, 4, 5]], device=device, dtype=torch.int32)
    tokens = greedy_tokens(logits, Following(numbers[0, :4], numbers[1, :4]))
    best: list[int] = tokens.tolist()
    assert numbers.tolist() == [[8, -1, 1, 41, 9], [best[0], 2, best[2], best[3], 5]]
