"""Scores and choices that start before the kernels in front have ended read what those wrote."""

import pytest
import torch

from kvlease.kernels.gpu.index_scores import IndexKeys, decode_scores
from kvlease.kernels.gpu.topk import choose_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RATIO, PAGE_ROWS, WIDTH, HEADS, K, STEPS = 4, 64, 128, 64, 512, 24


@pytest.mark.parametrize(("batch", "entries"), [(8, 4096), (8, 16384), (1, 262144)])
def test_steps_in_one_graph_choose_as_steps_alone(batch: int, entries: int) -> None:
    """Every step has queries and a newest key of its own, written right before it is scored."""
    torch.manual_seed(entries)
    pages = entries // PAGE_ROWS
    memory = torch.randn(batch * pages, PAGE_ROWS, WIDTH, device="cuda").bfloat16()
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int()
    lengths = entries - torch.arange(batch, device="cuda") * (entries // 16)
    positions = (lengths * RATIO - 1).int()
    last = lengths - 1
    newest = table.gather(1, (last // PAGE_ROWS).unsqueeze(1))[:, 0].long(), last % PAGE_ROWS
    drawn = torch.randn(STEPS, batch, HEADS, WIDTH, device="cuda").bfloat16()
    written = 3 * torch.randn(STEPS, batch, WIDTH, device="cuda").bfloat16()
    weights = torch.randn(batch, HEADS, device="cuda")
    queries = torch.zeros_like(drawn[0])
    scores = torch.zeros(batch, entries, device="cuda")
    out = torch.zeros(STEPS, batch, K, dtype=torch.int32, device="cuda")

    def step(n: int) -> None:
        queries.copy_(drawn[n])
        memory[newest] = written[n]
        decode_scores(
            queries, weights, IndexKeys.in_rows(memory), table, positions, scores,
            ratio=RATIO, programs=4 * 132,
        )  # fmt: skip
        choose_rows(scores, positions, table, out[n], ratio=RATIO, rows_per_page=PAGE_ROWS)

    for n in range(STEPS):
        step(n)
        torch.cuda.synchronize()
    alone = out.clone()
    assert all(not torch.equal(alone[n, 0], alone[n - 1, 0]) for n in range(STEPS))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(STEPS):
            step(n)
    for _ in range(5):
        out.fill_(-7)
        graph.replay()
        assert torch.equal(out, alone)
