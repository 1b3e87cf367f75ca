"""Experts of many rows, sorted on the device, against their twin."""

import pytest
import torch

from kvlease.kernels.gpu.many_experts import mix_many, sort_slots
from kvlease.kernels.moe import ExpertWeights, mix_experts
from kvlease.kernels.routing import Routing
from kvlease.kernels.tiling import FAST


@pytest.mark.parametrize(("rows", "experts"), [(1, 4), (37, 5), (700, 3), (683, 3)])
def test_slots_are_sorted_by_expert(rows: int, experts: int, device: str) -> None:
    """Every slot is there once, in order within its expert; one expert has none."""
    torch.manual_seed(rows)
    chosen = torch.randint(experts - 1, (rows, 3), device=device, dtype=torch.int32)
    chosen[chosen == 1] = experts - 1
    order = sort_slots(chosen, experts)
    owners = chosen.flatten()
    assert order.slots.tolist() == owners.sort(stable=True).indices.tolist()
    assert order.counts.tolist() == owners.bincount(minlength=experts).tolist()
    assert int(order.counts[1]) == 0


def converted(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    gate, up, down = (part.to(dtype) for part in (weights.gate, weights.up, weights.down))
    return ExpertWeights(gate, up, down, weights.num_experts)


def test_experts_of_many_rows(device: str) -> None:
    """An expert that nobody chose is poison and must not be read."""
    torch.manual_seed(3)
    rows, width, hidden, experts = 70, 64, 48, 5
    x = torch.randn(rows, width, device=device).bfloat16()
    gate, up = (torch.randn(experts, hidden, width, device=device) * 0.3 for _ in range(2))
    down = torch.randn(width, experts, hidden, device=device) * 0.1
    chosen = torch.tensor([0, 2, 3], device=device)[torch.rand(rows, 3, device=device).argsort(1)]
    chosen = torch.cat([chosen[:, :2], torch.full_like(chosen[:, :1], 4)], dim=1)
    shares = torch.rand(rows, 3, device=device)
    dense = torch.zeros(rows, experts, device=device).scatter_(1, chosen, shares)

    def packed(poison: float) -> ExpertWeights:
        for part in (gate[1], up[1], down[:, 1]):
            part.fill_(poison)
        return ExpertWeights(gate.flatten(0, 1), up.flatten(0, 1), down.flatten(1), experts)

    routing = Routing(dense, dense > 0)
    rounded = converted(converted(packed(0.0), torch.bfloat16), torch.float32)
    wanted = mix_experts(x.float(), routing, rounded, 1.0, FAST)
    narrow = converted(packed(torch.nan), torch.bfloat16)
    got = mix_many(x, chosen.int(), shares, narrow, 1.0).float().sum(0)
    assert torch.isfinite(got).all()
    assert float((got - wanted).norm() / wanted.norm()) < 1e-2
