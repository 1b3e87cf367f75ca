"""Choosing experts: by score with a correction bias, or by a fixed table from token ids.

Both return a dense [N, E] matrix of weights, which keeps the experts' sum in index order.
"""

from collections.abc import Callable
from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.activations import sigmoid, softplus

Scoring = Literal["sqrtsoftplus", "softmax", "sigmoid"]


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=-1)


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    return softplus(logits).sqrt_()


SCORES: dict[Scoring, Callable[[Tensor], Tensor]] = {
    "sqrtsoftplus": _sqrtsoftplus,
    "softmax": _softmax,
    "sigmoid": sigmoid,
}
"""Scoring functions by their name in a checkpoint's configuration."""


@frozen
class Routing:
    """Experts of N rows: weights [N, E], 0 where not chosen, and chosen [N, E] bool."""

    weights: Tensor
    chosen: Tensor


def choose_by_score(scores: Tensor, bias: Tensor, num_chosen: int) -> Tensor:
    """Return the ``num_chosen`` experts of highest score + bias; ties go to the lower index.

    Shapes: scores [N, E]; bias [E]; result [N, num_chosen] int64.
    """
    ranked = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices
    return ranked[:, :num_chosen]


def choose_by_token(table: Tensor, tokens: Tensor) -> Tensor:
    """Return the table's experts of each token. Shapes: table [V, K]; tokens [N]; result [N, K]."""
    return table.index_select(0, tokens)


def route(scores: Tensor, experts: Tensor, scale: float) -> Routing:
    """Return chosen experts' scores, normalised to sum to ``scale``.

    Shapes: scores [N, E], positive; experts [N, K] int64; an expert named twice counts twice.
    """
    picked = scores.gather(1, experts)
    picked = picked / picked.sum(dim=1, keepdim=True).add_(1e-20) * scale
    weights = torch.zeros_like(scores)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for slot in range(experts.shape[1]):  # slot by slot: a fixed order of additions
        weights.scatter_add_(1, experts[:, slot : slot + 1], picked[:, slot : slot + 1])
    chosen.scatter_(1, experts, True)
    return Routing(weights, chosen)
