"""Which positions of a prompt the unmodified oracle decides by a hair, and so may decide otherwise.

Top-k over index scores and over router scores is a jump: where the k-th and the next score nearly
agree, fp32 rounding picks, and every later position of the sequence sees the result.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DeepseekV4Config

GAP = 3e-6
"""Scores closer than this (both of order 1) count as a near tie."""


def first_near_tie(model: nn.Module, tokens: list[int], config: DeepseekV4Config) -> int:
    """Return the first position that a near tie can touch, or the prompt's length."""
    gaps: list[Tensor] = []
    ratio = config.compress_rates["compressed_sparse_attention"]

    def after_scorer(_module: nn.Module, _inputs: tuple[Tensor, ...], scores: Tensor) -> None:
        gaps.append(_index_gaps(scores[0], ratio, config.index_topk))

    def after_router(
        router: nn.Module, _inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]
    ) -> None:
        score: Callable[[Tensor], Tensor] = router.get_submodule("score_fn")
        scores = score(output[0]) + router.get_buffer("e_score_correction_bias")
        gaps.append(_gap(scores, config.num_experts_per_tok))

    handles: list[RemovableHandle] = []
    for module in model.modules():
        if type(module).__name__ == "DeepseekV4IndexerScorer":
            handles.append(module.register_forward_hook(after_scorer))
        elif type(module).__name__ == "DeepseekV4TopKRouter":
            handles.append(module.register_forward_hook(after_router))
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    close = torch.stack([gap < GAP for gap in gaps]).any(dim=0).nonzero()
    return int(close[0]) if len(close) else len(tokens)


def _index_gaps(scores: Tensor, ratio: int, k: int) -> Tensor:
    """Return each query's gap between its k-th and its next visible score, inf where all fit."""
    visible = (torch.arange(len(scores)) + 1) // ratio
    unseen = torch.arange(scores.shape[1]) >= visible.unsqueeze(1)
    if scores.shape[1] <= k:
        return torch.full((len(scores),), torch.inf)
    gap = _gap(scores.masked_fill(unseen, -torch.inf), k)
    return torch.where(visible > k, gap, torch.inf)


def _gap(scores: Tensor, k: int) -> Tensor:
    if scores.shape[-1] <= k:
        return torch.full(scores.shape[:-1], torch.inf)
    ranked = scores.sort(dim=-1, descending=True).values
    return ranked[..., k - 1] - ranked[..., k]
