"""Random small checkpoints of the Hugging Face model, with nothing left at its zero start."""

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4

_LONG = {"s": "sliding_attention", "c": "compressed_sparse_attention",
         "h": "heavily_compressed_attention"}  # fmt: skip


@frozen
class Shape:
    """One oracle case: layers as letters (s, c, h), MLPs as letters (h hash, m moe)."""

    name: str
    layers: str
    mlps: str
    page_tokens: int
    length: int
    ratios: tuple[int, int] = (4, 8)
    changes: dict[str, Any] = field(factory=dict)


def make_config(shape: Shape, *, index_heads: int) -> DeepseekV4Config:
    """Return the configuration of a case."""
    numbers: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 24,
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 24,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "sliding_window": 8,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": index_heads,
        "index_head_dim": 8,
        "index_topk": 4,
        "max_position_embeddings": 512,
        "partial_rotary_factor": 0.25,
    }
    return DeepseekV4Config(
        num_hidden_layers=len(shape.layers),
        layer_types=[_LONG[letter] for letter in shape.layers],
        mlp_layer_types=["hash_moe" if letter == "h" else "moe" for letter in shape.mlps],
        compress_rates={_LONG["c"]: shape.ratios[0], _LONG["h"]: shape.ratios[1]},
        attn_implementation="eager",
        experts_implementation="eager",
        **(numbers | shape.changes),
    )


def make_model(
    config: DeepseekV4Config, seed: int, *, module: ModuleType = modeling_deepseek_v4
) -> nn.Module:
    """Return a model of random weights; every bias, sink, base and table is random as well."""
    model: nn.Module = module.DeepseekV4ForCausalLM(config).eval()
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        tensor.copy_(_random_value(name, tensor, config, draw))
    return model


def _random_value(
    name: str, tensor: Tensor, config: DeepseekV4Config, draw: torch.Generator
) -> Tensor:
    if name.endswith("tid2eid"):
        return torch.randint(config.n_routed_experts, tuple(tensor.shape), generator=draw)
    values = torch.randn(tuple(tensor.shape), generator=draw)
    if "norm" in name:
        return values.mul_(0.2).add_(1.0)
    if "embed" in name:
        return values
    is_bias = tensor.ndim == 1 or "position_bias" in name
    return values.mul_(0.5 if is_bias else tensor.shape[-1] ** -0.5)


def save(model: nn.Module, folder: Path) -> Path:
    """Write config.json and safetensors the way transformers does."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def logits_of(model: nn.Module, tokens: list[int]) -> Tensor:
    """Return logits [S, V] of one unpadded prompt, without a cache."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


def random_tokens(config: DeepseekV4Config, count: int, seed: int) -> list[int]:
    """Return a random prompt."""
    rng = random.Random(seed)
    return [rng.randrange(config.vocab_size) for _ in range(count)]


YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 256,
}
SHAPES = (
    Shape("window shorter than a page, yarn", "sch", "hmm", 16, 150, changes=YARN),
    Shape(
        "window longer than pages",
        "csc",
        "mhm",
        8,
        120,
        changes={"sliding_window": 20, "num_attention_heads": 6, "o_groups": 3, "index_topk": 7},
    ),
    Shape(
        "many experts",
        "hcs",
        "mmm",
        16,
        100,
        ratios=(4, 16),
        changes=YARN | {"n_routed_experts": 20, "num_experts_per_tok": 3},
    ),
    Shape(
        "two streams, sigmoid scores, clamps that bite",
        "chc",
        "hhm",
        32,
        110,
        ratios=(8, 32),
        changes={
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "scoring_func": "sigmoid",
            "swiglu_limit": 0.5,
            "head_dim": 24,
            "partial_rotary_factor": 1 / 3,
            "sliding_window": 5,
            "index_topk": 3,
            "routed_scaling_factor": 2.5,
        },
    ),
    Shape("sparse layers only", "cc", "hm", 16, 130, changes={"index_topk": 9, "head_dim": 32}),
    Shape(
        "a window of one page, eight heads",
        "hsc",
        "mhm",
        32,
        140,
        ratios=(4, 16),
        changes=YARN | {"sliding_window": 32, "num_attention_heads": 8, "index_topk": 5},
    ),
)
"""Cases that both strengths run."""
