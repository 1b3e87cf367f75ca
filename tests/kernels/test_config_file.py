"""Reading config.json: both nestings, older spellings, and refusals that name file and key."""

import json
from pathlib import Path

import pytest

from kvlease.errors import ModelLoadError
from kvlease.kernels.models.config_file import read_config
from kvlease.kernels.rope import Yarn

BASE: dict[str, object] = {
    "model_type": "deepseek_v4",
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "max_position_embeddings": 512,
}


def write(folder: Path, **changes: object) -> Path:
    values = {key: value for key, value in (BASE | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_defaults_are_the_familys(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert config.layer_kinds == ("heavy", "heavy", "heavy", "sparse")
    assert config.mlp_kinds == ("hash", "hash", "hash", "score")
    assert (config.sparse_ratio, config.heavy_ratio) == (4, 128)
    assert (config.streams, config.sinkhorn_iterations) == (4, 20)
    assert (config.rope_theta, config.compress_rope_theta, config.yarn) == (1e4, 1.6e5, None)
    assert config.eos_tokens == frozenset()


def test_present_and_older_spellings_agree(tmp_path: Path) -> None:
    """Checkpoints of both ages are in circulation."""
    yarn = {"factor": 16, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
    present = read_config(
        write(
            tmp_path,
            layer_types=[
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
            compress_rates={
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 32,
            },
            qk_rope_head_dim=...,
            partial_rotary_factor=0.25,
            rope_parameters={
                "main": {"rope_type": "default", "rope_theta": 5000.0},
                "compress": yarn | {"rope_type": "yarn", "rope_theta": 9e4, "attention_factor": 1},
            },
            eos_token_id=[1, 2],
        )
    )
    older = read_config(
        write(
            tmp_path,
            # one entry more than there are layers: the draft layer's
            compress_ratios=[0, 4, 32, 4, 0],
            num_hash_layers=1,
            compress_rate_csa=4,
            compress_rate_hca=32,
            rope_theta=5000.0,
            compress_rope_theta=9e4,
            rope_scaling=yarn | {"type": "yarn"},
            eos_token_id=[1, 2],
        )
    )
    assert present == older
    assert older.layer_kinds == ("sliding", "sparse", "heavy", "sparse")
    assert older.yarn == Yarn(16.0, 128)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; only 'deepseek_v4'"),
        ({"head_dim": ...}, "head_dim is missing"),
        ({"head_dim": "16"}, "head_dim is '16'"),
        ({"index_topk": 0}, "index_topk is 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"scoring_func": "relu"}, "scoring_func is 'relu'"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim gives 5"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types holds 'full_attention'"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has 1 entries for 4 layers"),
        ({"compress_ratios": [0, 4, 7, 4]}, "compress_ratios holds 7"),
        ({"compress_ratios": [0, 4, [], 4]}, r"compress_ratios holds \[\]"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types holds 'dense'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1.2}}, "must be 1.0"),
        ({"rope_scaling": [1]}, "rope_scaling is"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'; give 'fp8'"),
        ({"quantization_config": {"weight_block_size": [1, 32]}}, "weight_block_size is"),
        (
            {"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "int4"},
            "expert_dtype is 'int4'; give 'fp8' or 'fp4'",
        ),
        ({"o_groups": 3}, "o_groups is 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok exceeds"),
        ({"index_head_dim": 2}, "index_head_dim is smaller"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
    ],
)
def test_what_cannot_be_run_is_refused_by_file_and_key(
    tmp_path: Path, changes: dict[str, object], sentence: str
) -> None:
    """A value silently ignored would give wrong answers with no sign of it."""
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        read_config(write(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"model_type": "deepseek_v4"'])
def test_damaged_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_config(tmp_path / "nowhere")
