"""The geometry of DeepSeek-V4-Flash with few experts, and random weights for it, on the device.

A checkpoint of that size cannot be had everywhere; its shapes decide the times.
"""

from __future__ import annotations

import torch
from attrs import evolve

from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.deepseek_v4 import DeepseekV4, ModelOptions
from kvlease.kernels.models.embedded import RandomTensors
from kvlease.kernels.models.weights import build_weights
from kvlease.protocols.geometries import StoreFormat

FLASH_LAYERS = 43
FOUR_LAYERS = V4Config(
    vocab_size=129_280,
    hidden=4096,
    layer_kinds=("sliding", "sparse", "sparse", "heavy"),
    mlp_kinds=("hash", "score", "score", "score"),
    num_heads=64,
    head_dim=512,
    rope_dim=64,
    q_rank=1024,
    o_groups=8,
    o_rank=1024,
    window=128,
    index_heads=64,
    index_dim=128,
    index_topk=512,
    num_experts=8,
    experts_per_token=6,
    expert_width=2048,
    max_positions=1 << 20,
)
"""Each kind of layer, with all sizes but the number of experts and layers those of Flash."""


def flash_config(num_layers: int = FLASH_LAYERS) -> V4Config:
    """Return Flash's layers: two sliding ones, then sparse and heavy ones in turns."""
    kinds = ("sliding", "sliding", *(("sparse", "heavy") * num_layers))[:num_layers]
    mlps = ("hash", "hash", "hash", *(("score",) * num_layers))[:num_layers]
    return evolve(FOUR_LAYERS, layer_kinds=kinds, mlp_kinds=mlps)


def random_model(config: V4Config, formats: StoreFormat, *, seed: int = 0) -> DeepseekV4:
    """Make a model with random bf16 weights on the current CUDA device.

    ``formats`` are those of latent rows and index keys. Raises ConfigError.
    """
    source = RandomTensors(config, seed, "cuda")
    weights = build_weights(config, source, torch.bfloat16, torch.device("cuda"))
    options = ModelOptions("bfloat16", formats, formats, exact=False, device="cuda")
    return DeepseekV4(config, weights, source.fingerprint(), options)
