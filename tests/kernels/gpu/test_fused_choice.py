"""Scores that raise the tops of the top-k that follows: the same choice, and tops as before."""

import torch

from kvlease.kernels.gpu.index_scores import IndexKeys, decode_scores
from kvlease.kernels.gpu.topk import NO_TOP, TopkPlan, choose_rows
from kvlease.kernels.topk import select_topk

RATIO = 4
PAGE_ROWS = 16


def test_the_choice_is_that_of_the_scores_alone(device: str) -> None:
    torch.manual_seed(0)
    k, width, lengths = 5, 160, [150, 0, 7, 97]
    num_pages = len(lengths) * width // PAGE_ROWS
    keys = IndexKeys.in_rows(torch.randn(num_pages, PAGE_ROWS, 32, device=device).bfloat16())
    queries = torch.randn(len(lengths), 16, 32, device=device).bfloat16()
    weights = torch.randn(len(lengths), 16, device=device)
    table = torch.randperm(num_pages, device=device).view(len(lengths), -1).int()
    positions = torch.tensor([n * RATIO - 1 for n in lengths], dtype=torch.int32, device=device)
    scores = torch.full((len(lengths), width), torch.nan, device=device)
    plan = TopkPlan.make(len(lengths), width, k, scores.device, short=32, part=64)
    assert plan.long is not None
    for _ in range(2):
        decode_scores(
            queries,
            weights,
            keys,
            table,
            positions,
            scores,
            ratio=RATIO,
            programs=3,
            tops=plan.long.tops,
        )
        out = torch.full((len(lengths), k), -7, dtype=torch.int32, device=device)
        choose_rows(
            scores,
            positions,
            table,
            out,
            plan,
            ratio=RATIO,
            rows_per_page=PAGE_ROWS,
            has_tops=True,
        )
        rows = select_topk(scores.cpu(), torch.tensor(lengths), k)
        pages = table.cpu().gather(1, rows.clamp(min=0) // PAGE_ROWS).long()
        wanted = torch.where(rows < 0, -1, pages * PAGE_ROWS + rows % PAGE_ROWS)
        assert out.tolist() == wanted.tolist()
        assert (plan.long.tops == NO_TOP).all()
