"""The geometry of DeepSeek-V4-Flash with few experts, and random weights for it, on the device.

A checkpoint of that size cannot be had everywhere; its shapes decide the times.
"""

from __future__ import annotations

import math

import torch
from attrs import evolve

from kvlease.kernels.models.config import MlpKind, V4Config
from kvlease.kernels.models.deepseek_v4 import DeepseekV4, ModelOptions
from kvlease.kernels.models.embedded import RandomTensors
from kvlease.kernels.models.tensor_names import layer_shapes, model_shapes
from kvlease.kernels.models.weights import build_weights
from kvlease.protocols.geometries import LayerKind, StoreFormat

FLASH_LAYERS = 43
_LATENT = 584
"""Bytes of a latent row in fp8."""
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
    turns: tuple[LayerKind, ...] = ("sparse", "heavy") * num_layers
    kinds: tuple[LayerKind, ...] = ("sliding", "sliding", *turns)
    scored: list[MlpKind] = ["score"] * num_layers
    mlps: tuple[MlpKind, ...] = ("hash", "hash", "hash", *scored)
    return evolve(FOUR_LAYERS, layer_kinds=kinds[:num_layers], mlp_kinds=mlps[:num_layers])


def random_model(config: V4Config, formats: StoreFormat, *, seed: int = 0) -> DeepseekV4:
    """Make a model with random bf16 weights on the current CUDA device.

    ``formats`` are those of latent rows and index keys. Raises ConfigError.
    """
    source = RandomTensors(config, seed, "cuda")
    weights = build_weights(config, source, torch.bfloat16, torch.device("cuda"))
    options = ModelOptions("bfloat16", formats, formats, exact=False, device="cuda")
    return DeepseekV4(config, weights, source.fingerprint(), options)


def step_nbytes(config: V4Config, batch: int, context: int) -> float:
    """Return the fewest bytes that a decode step reads: bf16 weights once, and fp8 cached rows.

    Of the routed experts those count that a batch of random tokens touches on average.
    """
    untouched = (1 - config.experts_per_token / config.num_experts) ** batch
    weights = math.prod(model_shapes(config)["head.weight"])
    rows = 0.0
    for number, kind in enumerate(config.layer_kinds):
        for name, shape in layer_shapes(config, number).items():
            is_routed = name.startswith("ffn.experts.")
            if name != "ffn.gate.tid2eid":
                weights += math.prod(shape) * ((1 - untouched) if is_routed else 1)
        rows += config.window * config.head_dim * 2
        if kind == "sparse":
            entries = context // config.sparse_ratio
            rows += entries * (config.index_dim + 4) + min(entries, config.index_topk) * _LATENT
        elif kind == "heavy":
            rows += context // config.heavy_ratio * _LATENT
    return 2 * weights + batch * rows
