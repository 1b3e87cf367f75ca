"""Experts of many rows, sorted on the device, against their twin."""

import pytest
import torch

from kvlease.kernels.gpu.many_experts import mix_many, sort_slots
from kvlease.kernels.moe import ExpertWeights, mix_experts
from kvlease.kernels.routing import Routing
from kvlease.kernels.tiling import FAST


@pytest.mark.parametrize(("rows", "experts", "tall"), [(1, 4, 16), (37, 5, 16), (50, 3, 32)])
def test_slots_are_sorted_by_expert(rows: int, experts: int, tall: int, device: str) -> None:
    """Every slot lies in a tile of its expert, once; the rest of a tile is no slot."""
    torch.manual_seed(rows)
    chosen = torch.randint(experts, (rows, 3), device=device, dtype=torch.int32)
    order = sort_slots(chosen, experts, tall)
    tiles = order.slots.view(-1, tall).tolist()
    seen: list[int] = []
    for slots, expert in zip(tiles, order.experts.tolist(), strict=True):
        real = [slot for slot in slots if slot < chosen.numel()]
        assert real == sorted(real)
        assert all(int(chosen.flatten()[slot]) == expert for slot in real)
        assert bool(real) == (expert >= 0)
        seen += real
    assert sorted(seen) == list(range(chosen.numel()))


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
