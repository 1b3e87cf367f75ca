"""One layer's mixture of experts by kernels: the same steps as ``moe_block``, in few launches."""

from torch import Tensor

from kvlease.kernels.gpu.few_experts import mix_few
from kvlease.kernels.gpu.many_experts import mix_many
from kvlease.kernels.gpu.products import multiply_exact
from kvlease.kernels.gpu.route_rows import route_rows
from kvlease.kernels.gpu.step_rows import projected
from kvlease.kernels.gpu.streams import BlockOutput
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.device_weights import DeviceLayer
from kvlease.kernels.moe import DENSE_EXPERTS

_FEW_ROWS = 128
"""Up to so many rows every one of few experts is read once, and meets all rows."""


def mix(hidden: Tensor, tokens: Tensor, layer: DeviceLayer, config: V4Config) -> BlockOutput:
    """Return the block's output. Shapes: hidden [N, D] bf16; tokens [N] int32."""
    moe = layer.weights.moe
    # a rounded score would change which experts a token meets
    logits = multiply_exact(hidden, layer.router)
    chosen, shares, dense = route_rows(
        projected(logits), tokens, moe.table, moe.bias, config.num_experts,
        config.experts_per_token, config.scoring, config.routed_scale,
    )  # fmt: skip
    if moe.experts.num_experts <= DENSE_EXPERTS and len(hidden) <= _FEW_ROWS:
        return BlockOutput(mix_few(hidden, dense, moe.experts, config.swiglu_limit))
    return BlockOutput(mix_many(hidden, chosen, shares, moe.experts, config.swiglu_limit))
