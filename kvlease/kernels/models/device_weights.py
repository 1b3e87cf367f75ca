"""A model's weights as the device's kernels take them, made once from `ModelWeights`.

Large matrices are the same tensors; only mixers and routers are packed anew.
"""

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.rotation import Turns, turn_tables
from kvlease.kernels.gpu.route_rows import pack_router
from kvlease.kernels.gpu.streams import PackedMixer, pack_mixer
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.weights import LayerWeights, ModelWeights


@frozen
class DeviceLayer:
    """One layer: its weights, both mixers packed, and the router as coarse and fine parts."""

    weights: LayerWeights
    attn_mixer: PackedMixer
    ffn_mixer: PackedMixer
    router: Tensor


@frozen
class DeviceWeights:
    """All weights, and the tables of both rotations for every position."""

    weights: ModelWeights
    layers: tuple[DeviceLayer, ...]
    head_mixer: PackedMixer
    main_turns: Turns
    compress_turns: Turns


def pack_weights(config: V4Config, weights: ModelWeights) -> DeviceWeights:
    """Return the weights for the kernels; shares every matrix with ``weights``."""
    device = weights.embed.device
    return DeviceWeights(
        weights,
        tuple(
            DeviceLayer(
                layer,
                pack_mixer(layer.attn_mixer),
                pack_mixer(layer.ffn_mixer),
                pack_router(layer.moe.router),
            )
            for layer in weights.layers
        ),
        pack_mixer(weights.head_mixer),
        turn_tables(config.main_rope, config.max_positions, device),
        turn_tables(config.compress_rope, config.max_positions, device),
    )


def runs_on_kernels(config: V4Config, weights: ModelWeights, dtype: torch.dtype) -> bool:
    """Whether the kernels can run this model: bf16, and widths that are powers of two."""
    widths = config.head_dim, config.index_dim, config.rope_dim, config.streams
    return (
        dtype == torch.bfloat16
        and weights.layers[0].moe.shared is None
        and all(width & (width - 1) == 0 for width in widths)
        and config.index_heads % 16 == 0
        and config.index_heads & (config.index_heads - 1) == 0
        and config.window & (config.window - 1) == 0
        and config.rope_dim <= min(config.head_dim, config.index_dim)
        and config.head_dim >= 64
    )
