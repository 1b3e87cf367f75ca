"""Compressors, indexer, top-k, attention, mixers, experts: batched twins against loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.kernels.attention import KeyBlock, sparse_attention
from kvlease.kernels.compressors import overlapping_slots, pool_groups
from kvlease.kernels.indexer import index_scores
from kvlease.kernels.linear import linear
from kvlease.kernels.mhc import sinkhorn
from kvlease.kernels.moe import ExpertWeights, mix_experts
from kvlease.kernels.projection import project_output
from kvlease.kernels.routing import SCORES, choose_by_score, choose_by_token, route
from kvlease.kernels.tiling import EXACT, FAST, Tiling, pad_rows, round_up
from kvlease.kernels.topk import select_topk
from tests.kernels import naive

TILINGS = [EXACT, FAST]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def check(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("slots", [1, 3, 8, 32])
def test_pooling_equals_the_loop(slots: int) -> None:
    values, gates = randn(5, slots, 6), randn(5, slots, 6)
    got = pool_groups(values, gates)
    for g in range(5):
        check(got[g], naive.pooled(values[g], gates[g]))


def test_group_zero_takes_nothing_from_before_the_start() -> None:
    """What lies before a sequence's first token is whatever the memory held: here NaN."""
    previous = randn(2, 4, 3)
    previous[0] = torch.nan
    current = randn(2, 4, 3)
    first = torch.tensor([True, False])
    values = overlapping_slots(previous, current, first, 0.0)
    gates = overlapping_slots(previous, current, first, -torch.inf)
    got = pool_groups(values, gates)
    assert torch.isfinite(got).all()
    check(got[0], naive.pooled(current[0], current[0]))
    both = torch.cat([previous[1], current[1]])
    check(got[1], naive.pooled(both, both))


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("shared", [True, False])
def test_index_scores_equal_the_loop(tiling: Tiling, shared: bool) -> None:
    rows, heads, width, num_keys = 32, 3, 8, 128
    queries, weights = randn(rows, heads, width), randn(rows, heads)
    keys = randn(1 if shared else rows, num_keys, width)
    got = index_scores(queries, weights, keys, tiling)
    for n in (0, 13, 31):
        for place in (0, 63, 64, 127):
            wanted = naive.index_score(queries[n], weights[n], keys[0 if shared else n, place])
            assert got[n, place].item() == pytest.approx(wanted, abs=1e-11)


@given(data=st.data(), num_keys=st.integers(1, 30), k=st.integers(1, 12))
def test_topk_prefers_lower_positions_and_lists_them_in_order(
    data: st.DataObject, num_keys: int, k: int
) -> None:
    """Scores from a small set, so that most queries tie, with NaN where nothing is visible."""
    rows = 4
    visible = data.draw(st.lists(st.integers(0, num_keys), min_size=rows, max_size=rows))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5])
    scores = [
        data.draw(st.lists(values, min_size=count, max_size=count))
        + [float("nan")] * (num_keys - count)
        for count in visible
    ]
    got = select_topk(torch.tensor(scores), torch.tensor(visible), k)
    wanted = [naive.topk(row[:count], k) for row, count in zip(scores, visible, strict=True)]
    assert got.tolist() == wanted


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("shared", [True, False])
def test_attention_equals_the_loop(tiling: Tiling, shared: bool) -> None:
    """Odd widths, a window, a longer block with an odd end, and rows that see nothing."""
    rows, heads, width = 32, 3, 10
    queries, sinks = randn(rows, heads, width), randn(heads)
    window, others = randn(rows, 5, width), randn(1 if shared else rows, 70, width)
    seen, seen_others = torch.rand(rows, 5) < 0.7, torch.rand(rows, 70) < 0.3
    seen[3], seen_others[3] = False, False
    blocks = [KeyBlock(window, seen), KeyBlock(others, seen_others)]
    got = sparse_attention(queries, sinks, blocks, 0.3, tiling)
    for n in (0, 3, 31):
        keys = [*window[n][seen[n]], *others[0 if shared else n][seen_others[n]]]
        wanted = naive.attention(queries[n], sinks, keys, 0.3)
        check(got[n], wanted)
    assert (got[3] == 0).all()


def test_keys_all_seen_need_no_mask() -> None:
    queries, sinks, keys = randn(4, 2, 6), randn(2), randn(4, 7, 6)
    everything = torch.ones(4, 7, dtype=torch.bool)
    with_mask = sparse_attention(queries, sinks, [KeyBlock(keys, everything)], 1.0, FAST)
    without = sparse_attention(queries, sinks, [KeyBlock(keys, None)], 1.0, FAST)
    assert torch.equal(with_mask, without)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_sinkhorn_equals_the_loop(size: int, iterations: int) -> None:
    matrices = torch.rand(6, size, size, dtype=torch.float64) + 1e-3
    got = sinkhorn(matrices, iterations, 1e-6)
    for n in range(6):
        check(got[n], naive.sinkhorn(matrices[n], iterations, 1e-6))


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("num_experts", [5, 20])
def test_both_forms_of_the_mixture_equal_the_loop(tiling: Tiling, num_experts: int) -> None:
    """Few experts take the dense form, many the gathered one; some experts get no row."""
    rows, width, inner, picks = 32, 6, 4, 2
    hidden = randn(rows, width)
    gate, up = randn(num_experts * inner, width), randn(num_experts * inner, width)
    down = randn(width, num_experts * inner)
    experts = torch.randint(num_experts - 1, (rows, picks))
    scores = torch.rand(rows, num_experts, dtype=torch.float64) + 0.1
    routing = route(scores, experts, 1.5)
    weights = ExpertWeights(gate, up, down, num_experts)
    got = mix_experts(hidden, routing, weights, 0.8, tiling)
    for n in (0, 7, 31):
        total = sum(float(scores[n, e]) for e in experts[n])
        wanted = torch.zeros(width, dtype=torch.float64)
        for e in experts[n].tolist():
            of = slice(e * inner, (e + 1) * inner)
            out = naive.expert(hidden[n], gate[of], up[of], down[:, of], 0.8)
            wanted += out * float(scores[n, e]) / total * 1.5
        check(got[n], wanted)


def test_routing_breaks_ties_by_index_and_uses_the_bias_for_choice_only() -> None:
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    assert choose_by_score(scores, torch.zeros(4), 2).tolist() == [[1, 2]]
    chosen = choose_by_score(scores, torch.tensor([9.0, 0.0, 0.0, 0.0]), 2)
    assert chosen.tolist() == [[0, 1]]
    torch.testing.assert_close(
        route(scores, chosen, 3.0).weights, torch.tensor([[1.0, 2.0, 0.0, 0.0]])
    )
    table = torch.tensor([[0, 1], [2, 3]])
    assert choose_by_token(table, torch.tensor([1, 0, 1])).tolist() == [[2, 3], [0, 1], [2, 3]]


def test_scores_by_name() -> None:
    logits = randn(4, 6) * 5
    torch.testing.assert_close(SCORES["softmax"](logits), logits.softmax(1))
    torch.testing.assert_close(SCORES["sigmoid"](logits), logits.sigmoid())
    wanted = torch.nn.functional.softplus(logits).sqrt()
    torch.testing.assert_close(SCORES["sqrtsoftplus"](logits), wanted)


@pytest.mark.parametrize("tiling", TILINGS)
def test_grouped_projection_equals_the_loop(tiling: Tiling) -> None:
    heads, down, up = randn(32, 6, 4), randn(3, 5, 8), randn(7, 15)
    got = project_output(heads, down, up, tiling)
    for n in (0, 31):
        low = torch.cat([down[g] @ heads[n, 2 * g : 2 * g + 2].flatten() for g in range(3)])
        check(got[n], up @ low)


@settings(max_examples=20)
@given(rows=st.integers(1, 70), inner=st.integers(1, 40), outer=st.integers(1, 40))
def test_linear_equals_a_product(rows: int, inner: int, outer: int) -> None:
    x, weight = randn(rows, inner), randn(outer, inner)
    padded = pad_rows(x, round_up(rows, EXACT.rows))
    check(linear(padded, weight, EXACT)[:rows], x @ weight.T)
    check(linear(x, weight, FAST), x @ weight.T)


def test_linear_refuses_what_would_not_be_exact() -> None:
    with pytest.raises(LayoutMismatch, match="33 rows"):
        linear(randn(33, 4), randn(2, 4), EXACT)
    with pytest.raises(LayoutMismatch, match="width 4"):
        linear(randn(32, 4), randn(2, 5), EXACT)
