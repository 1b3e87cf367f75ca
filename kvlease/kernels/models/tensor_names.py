"""Names and shapes of a checkpoint's tensors, and how other spellings map to them.

Checkpoints of this family come in the original spelling (``layers.0.attn.wq_a.weight``) and in the
one of the Hugging Face modules (``model.layers.0.self_attn.q_a_proj.weight``), also mixed. The
original one is canonical here. This module reads no file.
"""

import re

from kvlease.kernels.models.config import V4Config

Shapes = dict[str, tuple[int, ...]]

_RENAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^model\.", ""),
        (r"\.weight_scale_inv$", ".scale"),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.sinks$", ".attn_sink"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.compressor\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"(\.experts\.\d+)\.gate_proj\.", r"\1.w1."),
        (r"(\.experts\.\d+)\.down_proj\.", r"\1.w2."),
        (r"(\.experts\.\d+)\.up_proj\.", r"\1.w3."),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.gate_proj\.", ".wgate."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
    )
)

FUSED_UP = "ffn.experts.gate_up_proj"
FUSED_DOWN = "ffn.experts.down_proj"
"""All experts of a layer as one tensor, [E, 2F, D] and [E, D, F]; taken instead of w1, w2, w3."""


def canonical_name(name: str) -> str:
    """Return the canonical spelling of a tensor's name; names it does not know pass unchanged."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def is_ignored(name: str) -> bool:
    """Whether a (canonical) tensor belongs to draft layers, which are not loaded."""
    return name.startswith("mtp.")


def model_shapes(config: V4Config) -> Shapes:
    """Return names and shapes of the tensors outside layers."""
    flat = config.streams * config.hidden
    shapes: Shapes = {
        "embed.weight": (config.vocab_size, config.hidden),
        "norm.weight": (config.hidden,),
        "hc_head_fn": (config.streams, flat),
        "hc_head_base": (config.streams,),
        "hc_head_scale": (1,),
    }
    if not config.tied_head:
        shapes["head.weight"] = (config.vocab_size, config.hidden)
    return shapes


def layer_shapes(config: V4Config, layer: int) -> Shapes:
    """Return names (without ``layers.N.``) and shapes of one layer's tensors."""
    c = config
    mixes = c.streams * (2 + c.streams)
    shapes: Shapes = {
        "attn.attn_sink": (c.num_heads,),
        "attn.kv_norm.weight": (c.head_dim,),
        "attn.q_norm.weight": (c.q_rank,),
        "attn.wkv.weight": (c.head_dim, c.hidden),
        "attn.wq_a.weight": (c.q_rank, c.hidden),
        "attn.wq_b.weight": (c.num_heads * c.head_dim, c.q_rank),
        "attn.wo_a.weight": (c.o_groups * c.o_rank, c.num_heads * c.head_dim // c.o_groups),
        "attn.wo_b.weight": (c.hidden, c.o_groups * c.o_rank),
        "attn_norm.weight": (c.hidden,),
        "ffn_norm.weight": (c.hidden,),
        "ffn.gate.weight": (c.num_experts, c.hidden),
    }
    for mixer in ("hc_attn", "hc_ffn"):
        parts = {"fn": (mixes, c.streams * c.hidden), "base": (mixes,), "scale": (3,)}
        shapes |= {f"{mixer}_{part}": shape for part, shape in parts.items()}
    match c.layer_kinds[layer]:
        case "sliding":
            pass
        case "sparse":
            shapes |= _compressor("attn.compressor", 2 * c.head_dim, c.head_dim, c.sparse_ratio, c)
            shapes |= _compressor(
                "attn.indexer.compressor", 2 * c.index_dim, c.index_dim, c.sparse_ratio, c
            )
            shapes["attn.indexer.wq_b.weight"] = (c.index_heads * c.index_dim, c.q_rank)
            shapes["attn.indexer.weights_proj.weight"] = (c.index_heads, c.hidden)
        case "heavy":
            shapes |= _compressor("attn.compressor", c.head_dim, c.head_dim, c.heavy_ratio, c)
    if c.mlp_kinds[layer] == "hash":
        shapes["ffn.gate.tid2eid"] = (c.vocab_size, c.experts_per_token)
    else:
        shapes["ffn.gate.bias"] = (c.num_experts,)
    for expert in range(c.num_experts):
        shapes |= _expert(f"ffn.experts.{expert}", c)
    return shapes | _expert("ffn.shared_experts", c)


def _compressor(prefix: str, width: int, rows: int, ratio: int, config: V4Config) -> Shapes:
    return {
        f"{prefix}.wkv.weight": (width, config.hidden),
        f"{prefix}.wgate.weight": (width, config.hidden),
        f"{prefix}.ape": (ratio, width),
        f"{prefix}.norm.weight": (rows,),
    }


def _expert(prefix: str, config: V4Config) -> Shapes:
    return {
        f"{prefix}.w1.weight": (config.expert_width, config.hidden),
        f"{prefix}.w2.weight": (config.hidden, config.expert_width),
        f"{prefix}.w3.weight": (config.expert_width, config.hidden),
    }
