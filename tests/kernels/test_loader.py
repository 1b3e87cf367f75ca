"""Loading checkpoints: spellings, shards, dtypes, and refusals that name file and tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from torch import Tensor

from kvlease.errors import ModelLoadError
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.embedded import EMBEDDED_CONFIG, RandomTensors
from kvlease.kernels.models.loader import Checkpoint
from kvlease.kernels.models.tensor_names import canonical_name
from kvlease.kernels.models.weights import ModelWeights, build_weights

CONFIG = evolve(
    EMBEDDED_CONFIG,
    vocab_size=16,
    hidden=16,
    layer_kinds=("sparse", "heavy"),
    mlp_kinds=("hash", "score"),
    num_heads=2,
    head_dim=8,
    rope_dim=4,
    q_rank=8,
    o_rank=4,
    index_heads=2,
    index_dim=8,
    num_experts=3,
    expert_width=4,
)
MODULE_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "layers.0.hc_attn_fn": "model.layers.0.attn_hc.fn",
    "layers.0.hc_ffn_scale": "model.layers.0.ffn_hc.scale",
    "layers.0.attn.attn_sink": "model.layers.0.self_attn.sinks",
    "layers.0.attn.kv_norm.weight": "model.layers.0.attn.norm.weight",
    "layers.0.attn.wq_a.weight": "model.layers.0.self_attn.q_a_proj.weight",
    "layers.0.attn.q_norm.weight": "model.layers.0.self_attn.q_a_norm.weight",
    "layers.0.attn.compressor.ape": "model.layers.0.self_attn.compressor.position_bias",
    "layers.0.attn.compressor.norm.weight": "model.layers.0.self_attn.compressor.kv_norm.weight",
    "layers.0.attn.indexer.compressor.wgate.weight": (
        "model.layers.0.self_attn.compressor.indexer.gate_proj.weight"
    ),
    "layers.0.attn.indexer.compressor.norm.weight": (
        "model.layers.0.self_attn.compressor.indexer.kv_norm.weight"
    ),
    "layers.0.attn.indexer.wq_b.weight": (
        "model.layers.0.self_attn.compressor.indexer.q_b_proj.weight"
    ),
    "layers.0.attn.indexer.weights_proj.weight": (
        "model.layers.0.self_attn.compressor.indexer.scorer.weights_proj.weight"
    ),
    "layers.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "layers.0.ffn.gate.tid2eid": "model.layers.0.mlp.gate.tid2eid",
    "layers.1.ffn.gate.bias": "model.layers.1.mlp.gate.e_score_correction_bias",
    "layers.1.ffn.experts.2.w3.weight": "model.layers.1.mlp.experts.2.up_proj.weight",
    "layers.1.ffn.shared_experts.w2.weight": ("model.layers.1.mlp.shared_experts.down_proj.weight"),
}


def tensors(config: V4Config = CONFIG) -> dict[str, Tensor]:
    source = RandomTensors(config)
    return {name: source.tensor(name) for name in source.names()}


def load(folder: Path, config: V4Config = CONFIG) -> ModelWeights:
    with Checkpoint(folder, config) as checkpoint:
        return build_weights(config, checkpoint, torch.float32)


def flat(weights: ModelWeights) -> list[Tensor]:
    found: list[Tensor] = []

    def walk(part: object) -> None:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, tuple):
            for item in part:
                walk(item)
        elif hasattr(part, "__attrs_attrs__"):
            for name in (a.name for a in part.__attrs_attrs__):
                walk(getattr(part, name))

    walk(weights)
    return found


def same(one: ModelWeights, two: ModelWeights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(flat(one), flat(two), strict=True))


@pytest.fixture
def wanted() -> ModelWeights:
    return build_weights(CONFIG, RandomTensors(CONFIG), torch.float32)


@pytest.mark.parametrize(("canonical", "other"), MODULE_NAMES.items())
def test_spellings_map_to_the_canonical_one(canonical: str, other: str) -> None:
    assert canonical_name(other) == canonical
    assert canonical_name(canonical) == canonical


def test_both_spellings_load_alike(tmp_path: Path, wanted: ModelWeights) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    assert same(load(tmp_path), wanted)
    mixed = {MODULE_NAMES.get(name, name): value for name, value in tensors().items()}
    save_file(mixed | {"mtp.0.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert same(load(tmp_path), wanted)


def test_fused_experts_load_alike(tmp_path: Path, wanted: ModelWeights) -> None:
    """The Hugging Face modules keep all experts of a layer in two tensors."""
    stored = tensors()
    for layer in (0, 1):
        prefix = f"layers.{layer}.ffn.experts"
        parts = {
            w: [stored.pop(f"{prefix}.{e}.{w}.weight") for e in range(CONFIG.num_experts)]
            for w in ("w1", "w2", "w3")
        }
        both = [torch.cat(pair) for pair in zip(parts["w1"], parts["w3"], strict=True)]
        stored[f"{prefix}.gate_up_proj"] = torch.stack(both)
        stored[f"{prefix}.down_proj"] = torch.stack(parts["w2"])
    save_file(stored, tmp_path / "model.safetensors")
    assert same(load(tmp_path), wanted)


def test_shards_load_alike(tmp_path: Path, wanted: ModelWeights) -> None:
    stored = tensors()
    names = list(stored)
    index: dict[str, str] = {}
    for number in range(3):
        part = {name: stored[name] for name in names[number::3]}
        save_file(part, tmp_path / f"part-{number}.safetensors")
        index |= dict.fromkeys(part, f"part-{number}.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    assert same(load(tmp_path), wanted)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"part-1.*missing"):
        load(tmp_path)
    path.write_text("{}")
    with pytest.raises(ModelLoadError, match="not an index"):
        load(tmp_path)


def test_bfloat16_is_widened(tmp_path: Path) -> None:
    stored = {
        name: value.bfloat16() if value.is_floating_point() else value.int()
        for name, value in tensors().items()
    }
    save_file(stored, tmp_path / "model.safetensors")
    embed = load(tmp_path).embed
    assert embed.dtype == torch.float32
    assert torch.equal(embed, stored["embed.weight"].float())


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tied = evolve(CONFIG, tied_head=True)
    save_file(tensors(tied), tmp_path / "model.safetensors")
    weights = load(tmp_path, tied)
    assert weights.head is weights.embed


def _missing(stored: dict[str, Tensor]) -> None:
    del stored["layers.1.attn.wkv.weight"]


def _misshapen(stored: dict[str, Tensor]) -> None:
    stored["layers.1.attn.wkv.weight"] = torch.zeros(3, 3)


def _quantised(stored: dict[str, Tensor]) -> None:
    name = "layers.0.attn.wq_a.weight"
    stored[name] = stored[name].to(torch.float8_e4m3fn)


def _not_finite(stored: dict[str, Tensor]) -> None:
    stored["norm.weight"][0] = torch.nan


def _unknown_expert(stored: dict[str, Tensor]) -> None:
    stored["layers.0.ffn.gate.tid2eid"][3, 0] = 99


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_missing, "layers.1.attn.wkv.weight is missing"),
        (_misshapen, r"layers.1.attn.wkv.weight has shape \[3, 3\], config.json asks for"),
        (
            _quantised,
            r"wq_a.weight is stored as F8_E4M3; .* beside them in layers.0.attn.wq_a.scale",
        ),
        (_not_finite, "norm.weight holds values that cannot be weights"),
        (_unknown_expert, "tid2eid holds values that cannot be weights"),
    ],
)
def test_bad_tensors_are_refused_by_name(
    tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], sentence: str
) -> None:
    """The alternative is a traceback, or wrong answers."""
    stored = tensors()
    damage(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 7, 200, -1000])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*not a whole safetensors"):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="neither"):
        load(tmp_path)


def test_the_fingerprint_names_weights_and_geometry(tmp_path: Path) -> None:
    """Two checkpoints under one fingerprint would share cached rows (R10)."""

    def fingerprint(stored: dict[str, Tensor], config: V4Config = CONFIG) -> str:
        save_file(stored, tmp_path / "model.safetensors")
        with Checkpoint(tmp_path, config) as checkpoint:
            return checkpoint.fingerprint()

    first = fingerprint(tensors())
    assert first == fingerprint(tensors())
    changed = tensors()
    changed["layers.1.ffn.gate.bias"][0] += 1e-3
    assert fingerprint(changed) != first
    assert fingerprint(tensors(), evolve(CONFIG, swiglu_limit=9.0)) != first
