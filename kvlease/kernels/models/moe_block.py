"""One layer's mixture of experts inside a step: route, compute, add the shared expert."""

import torch
from torch import Tensor

from kvlease.kernels.linear import linear
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.weights import MoeWeights
from kvlease.kernels.moe import mix_experts
from kvlease.kernels.routing import SCORES, Routing, choose_by_score, choose_by_token, route
from kvlease.kernels.tiling import Tiling


def mix(
    hidden: Tensor, tokens: Tensor, weights: MoeWeights, config: V4Config, tiling: Tiling
) -> Tensor:
    """Return the block's output. Shapes: hidden [N, D]; tokens [N] int64; result like hidden."""
    # scores are wide: a rounded score would change which experts a token meets
    logits = linear(hidden.to(weights.router.dtype), weights.router, tiling)
    scores = SCORES[config.scoring](logits)
    if weights.table is not None:
        experts = choose_by_token(weights.table, tokens)
    else:
        bias = scores.new_zeros(scores.shape[1]) if weights.bias is None else weights.bias
        experts = choose_by_score(scores, bias, config.experts_per_token)
    routing = route(scores, experts, config.routed_scale)
    if weights.shared is None:
        return mix_experts(
            hidden, _with_shared(routing), weights.experts, config.swiglu_limit, tiling
        )
    routed = mix_experts(hidden, routing, weights.experts, config.swiglu_limit, tiling)
    everyone = scores.new_ones((len(hidden), 1))
    shared = Routing(everyone, everyone.bool())
    return routed + mix_experts(hidden, shared, weights.shared, config.swiglu_limit, tiling)


def _with_shared(routing: Routing) -> Routing:
    """Return the routing with one more expert, that every row takes with weight 1."""
    one = routing.weights.new_ones((len(routing.weights), 1))
    return Routing(
        torch.cat([routing.weights, one], dim=1), torch.cat([routing.chosen, one.bool()], dim=1)
    )
