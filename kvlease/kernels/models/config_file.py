"""Reading ``config.json`` of a ``deepseek_v4`` checkpoint, present and older spellings.

What the model code cannot compute is refused here, in one sentence that names file and key.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from kvlease.errors import ModelLoadError
from kvlease.kernels.models.config import MlpKind, V4Config
from kvlease.kernels.models.quantized import FP8_BLOCK
from kvlease.kernels.rope import Yarn
from kvlease.kernels.routing import SCORES, Scoring
from kvlease.protocols.geometries import LayerKind

_LAYER_NAMES: dict[object, LayerKind] = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}
_MLP_NAMES: dict[object, MlpKind] = {"hash_moe": "hash", "moe": "score"}
T = TypeVar("T")
# keys that may be absent or hold this value only, because nothing else is implemented
_FIXED: dict[str, object] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
}
_QUANTIZED: dict[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "weight_block_size": (list(FP8_BLOCK),),
    "expert_dtype": ("fp8", "fp4"),
}


class _Reader:
    """Typed access to the keys of one parsed file; every refusal names file and key."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self.values = values

    def refuse(self, key: str, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {key} {why}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.refuse(key, "is missing; give a whole number")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, f"is {value!r}; give a whole number of at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(key, f"is {value!r}; give a number above 0")
        return float(value)

    def mapping(self, key: str) -> Mapping[str, object]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.refuse(key, f"is {value!r}; give an object")
        return cast("dict[str, object]", value)

    def sequence(self, key: str) -> list[object]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.refuse(key, f"is {value!r}; give a list")
        return cast("list[object]", value)


def read_config(folder: Path) -> V4Config:
    """Return the configuration of a checkpoint folder.

    Raises:
        ModelLoadError: no such file, not JSON, another model type, or a value that is missing,
            malformed, or asks for something that is not implemented.
    """
    path = folder / "config.json"
    try:
        raw: object = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{path}: is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path}: holds no JSON object")
    return parse_config(path, cast("dict[str, object]", raw))


def _check_quantization(r: _Reader) -> None:
    """Refuse formats that the loader does not read; how each tensor is stored it sees itself."""
    asked = r.mapping("quantization_config")
    if not asked:
        return
    found = {"expert_dtype": r.values.get("expert_dtype"), **asked}
    for key, known in _QUANTIZED.items():
        value = found.get(key)
        if value is not None and value not in known:
            choices = " or ".join(repr(each) for each in known)
            raise r.refuse(f"quantization_config.{key}", f"is {value!r}; give {choices}")


def parse_config(path: Path, values: Mapping[str, object]) -> V4Config:
    """Return the configuration that ``values`` describe; ``path`` is for messages only.

    Raises:
        ModelLoadError: as `read_config`.
    """
    r = _Reader(path, values)
    if r.values.get("model_type") != "deepseek_v4":
        raise r.refuse(
            "model_type", f"is {r.values.get('model_type')!r}; only 'deepseek_v4' is supported"
        )
    for key, only in _FIXED.items():
        if r.has(key) and r.values[key] != only:
            raise r.refuse(key, f"is {r.values[key]!r}; only {only!r} is supported")
    _check_quantization(r)
    num_layers = r.integer("num_hidden_layers")
    head_dim = r.integer("head_dim")
    rope_dim = _rope_dim(r, head_dim)
    sparse_ratio, heavy_ratio = _ratios(r)
    main_theta, compress_theta, yarn = _rope(r)
    config = V4Config(
        vocab_size=r.integer("vocab_size"),
        hidden=r.integer("hidden_size"),
        layer_kinds=_layer_kinds(r, num_layers, sparse_ratio, heavy_ratio),
        mlp_kinds=_mlp_kinds(r, num_layers),
        num_heads=r.integer("num_attention_heads"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_rank=r.integer("q_lora_rank"),
        o_groups=r.integer("o_groups"),
        o_rank=r.integer("o_lora_rank"),
        window=r.integer("sliding_window"),
        index_heads=r.integer("index_n_heads"),
        index_dim=r.integer("index_head_dim"),
        index_topk=r.integer("index_topk"),
        num_experts=r.integer("n_routed_experts"),
        experts_per_token=r.integer("num_experts_per_tok"),
        expert_width=r.integer("moe_intermediate_size"),
        max_positions=r.integer("max_position_embeddings"),
        sparse_ratio=sparse_ratio,
        heavy_ratio=heavy_ratio,
        streams=r.integer("hc_mult", 4),
        sinkhorn_iterations=r.integer("hc_sinkhorn_iters", 20),
        mixer_eps=r.number("hc_eps", 1e-6),
        norm_eps=r.number("rms_norm_eps", 1e-6),
        scoring=_scoring(r),
        routed_scale=r.number("routed_scaling_factor", 1.5),
        swiglu_limit=r.number("swiglu_limit", 10.0),
        rope_theta=main_theta,
        compress_rope_theta=compress_theta,
        yarn=yarn,
        eos_tokens=_eos(r),
        tied_head=r.values.get("tie_word_embeddings") is True,
    )
    _check_divisions(r, config)
    return config


def _check_divisions(r: _Reader, config: V4Config) -> None:
    if config.num_heads % config.o_groups:
        raise r.refuse("o_groups", f"is {config.o_groups}, which does not divide the heads")
    if config.experts_per_token > config.num_experts:
        raise r.refuse("num_experts_per_tok", "exceeds n_routed_experts")
    if config.rope_dim > config.index_dim:
        raise r.refuse("index_head_dim", "is smaller than the rotary channels")


def _scoring(r: _Reader) -> Scoring:
    name = r.values.get("scoring_func", "sqrtsoftplus")
    for known in SCORES:
        if name == known:
            return known
    raise r.refuse("scoring_func", f"is {name!r}; known are {', '.join(SCORES)}")


def _rope_dim(r: _Reader, head_dim: int) -> int:
    if r.has("qk_rope_head_dim"):
        dim, key = r.integer("qk_rope_head_dim"), "qk_rope_head_dim"
    else:
        key = "partial_rotary_factor"
        dim = int(head_dim * r.number(key, 64 / 512))
    if dim % 2 or not 0 < dim <= head_dim:
        raise r.refuse(key, f"gives {dim} rotary channels; give an even number within head_dim")
    return dim


def _ratios(r: _Reader) -> tuple[int, int]:
    rates = _Reader(r.path, r.mapping("compress_rates"))
    sparse = rates.integer("compressed_sparse_attention", 4)
    heavy = rates.integer("heavily_compressed_attention", 128)
    return r.integer("compress_rate_csa", sparse), r.integer("compress_rate_hca", heavy)


def _layer_kinds(r: _Reader, num_layers: int, sparse: int, heavy: int) -> tuple[LayerKind, ...]:
    names: dict[object, LayerKind] = dict(_LAYER_NAMES)
    if r.has("layer_types"):
        key = "layer_types"
    elif r.has("compress_ratios"):
        key = "compress_ratios"
        names = {0: "sliding", 4: "sparse", 128: "heavy", sparse: "sparse", heavy: "heavy"}
    else:
        # the family's default: two heavy layers, then heavy and sparse in turn
        rest: list[LayerKind] = ["sparse" if i % 2 else "heavy" for i in range(num_layers)]
        return ("heavy", "heavy", *rest)[:num_layers]
    entries = r.sequence(key)
    if len(entries) < num_layers:
        raise r.refuse(key, f"has {len(entries)} entries for {num_layers} layers")
    # entries past the last layer belong to draft layers, which are not loaded
    return tuple(_named(r, key, names, entry) for entry in entries[:num_layers])


def _mlp_kinds(r: _Reader, num_layers: int) -> tuple[MlpKind, ...]:
    if r.has("mlp_layer_types"):
        entries = r.sequence("mlp_layer_types")
        if len(entries) < num_layers:
            raise r.refuse("mlp_layer_types", f"has {len(entries)} entries for {num_layers} layers")
        return tuple(_named(r, "mlp_layer_types", _MLP_NAMES, e) for e in entries[:num_layers])
    num_hash = r.integer("num_hash_layers", 3, least=0)
    return tuple("hash" if layer < num_hash else "score" for layer in range(num_layers))


def _named(r: _Reader, key: str, names: Mapping[object, T], entry: object) -> T:
    try:
        return names[entry]
    except (KeyError, TypeError):
        known = ", ".join(repr(name) for name in names)
        raise r.refuse(key, f"holds {entry!r}; known are {known}") from None


def _rope(r: _Reader) -> tuple[float, float, Yarn | None]:
    """Return both bases and the stretching of the compressed branch, from either nesting."""
    key = "rope_parameters" if r.has("rope_parameters") else "rope_scaling"
    given = r.mapping(key)
    main_theta = r.number("rope_theta", 10000.0)
    compress_theta = r.number("compress_rope_theta", 160000.0)
    nested = [given.get(name) for name in ("main", "compress")]
    if all(isinstance(part, dict) for part in nested):
        main, compress = (_Reader(r.path, cast("dict[str, object]", part)) for part in nested)
        main_theta = main.number("rope_theta", main_theta)
        compress_theta = compress.number("rope_theta", compress_theta)
        if _rope_type(main, f"{key}.main") != "default":
            raise r.refuse(f"{key}.main.rope_type", "must be 'default' for sliding layers")
    else:
        compress = _Reader(r.path, given)
    kind = _rope_type(compress, key)
    if kind == "default":
        return main_theta, compress_theta, None
    if kind != "yarn":
        raise r.refuse(f"{key}.rope_type", f"is {kind!r}; known are 'default' and 'yarn'")
    if compress.number("attention_factor", 1.0) != 1.0:
        raise r.refuse(f"{key}.attention_factor", "must be 1.0, the family's fixed value")
    if not compress.has("factor"):
        raise r.refuse(f"{key}.factor", "is missing for 'yarn'")
    yarn = Yarn(
        factor=compress.number("factor", 1.0),
        original_positions=compress.integer(
            "original_max_position_embeddings", r.integer("max_position_embeddings")
        ),
        beta_fast=compress.number("beta_fast", 32.0),
        beta_slow=compress.number("beta_slow", 1.0),
    )
    return main_theta, compress_theta, yarn


def _rope_type(part: _Reader, key: str) -> str:
    kind = part.values.get("rope_type", part.values.get("type", "default"))
    if not isinstance(kind, str):
        raise part.refuse(f"{key}.rope_type", f"is {kind!r}; known are 'default' and 'yarn'")
    return kind


def _eos(r: _Reader) -> frozenset[int]:
    value = r.values.get("eos_token_id")
    entries = cast("list[object]", value) if isinstance(value, list) else [value]
    tokens = [entry for entry in entries if entry is not None]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise r.refuse("eos_token_id", f"is {value!r}; give a token id or a list of them")
    return frozenset(cast("list[int]", tokens))
