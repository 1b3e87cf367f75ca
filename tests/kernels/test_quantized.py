"""Quantised checkpoints: the numbers that come out, and what is refused (block fp8, packed fp4)."""

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
from kvlease.kernels.models.quantized import dequantized, scale_name

# dimensions that the blocks of 128 do not divide, and rows that blocks of 32 do
CONFIG: V4Config = evolve(
    EMBEDDED_CONFIG,
    vocab_size=16,
    hidden=160,
    layer_kinds=("sparse", "heavy"),
    mlp_kinds=("hash", "score"),
    num_heads=2,
    head_dim=16,
    rope_dim=4,
    q_rank=136,
    o_rank=4,
    index_heads=2,
    index_dim=8,
    num_experts=3,
    expert_width=64,
)
LINEAR = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def plain() -> dict[str, Tensor]:
    source = RandomTensors(CONFIG)
    return {name: source.tensor(name).float() for name in source.names() if "tid2eid" not in name}


def is_linear(name: str) -> bool:
    *_, last, kind = name.split(".") if "." in name else ("", "", "")
    return kind == "weight" and last in LINEAR and ".compressor." not in name


def quantize_fp8(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, float scales, and what they stand for, block by block in plain loops."""
    rows, columns = -(-value.shape[0] // 128), -(-value.shape[1] // 128)
    codes = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    meant = torch.empty_like(value)
    for i in range(rows):
        for j in range(columns):
            place = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            scale = value[place].abs().max() / 448
            scales[i, j] = scale
            codes[place] = (value[place] / scale).to(torch.float8_e4m3fn)
            meant[place] = codes[place].float() * scale
    return codes, scales, meant


def quantize_fp4(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, exponents + 127 as bytes, and what they stand for, value by value."""
    table = [*E2M1, *(-number for number in E2M1)]
    packed = torch.empty(value.shape[0], value.shape[1] // 2, dtype=torch.int8)
    exponents = torch.empty(value.shape[0], value.shape[1] // 32, dtype=torch.uint8)
    meant = torch.empty_like(value)
    for row, numbers in enumerate(value.tolist()):
        for block in range(len(numbers) // 32):
            part = numbers[block * 32 : block * 32 + 32]
            exponent = int(torch.tensor(max(map(abs, part)) / 6).log2().ceil())
            exponents[row, block] = exponent + 127
            codes = [min(range(16), key=lambda c: abs(table[c] - n / 2.0**exponent)) for n in part]
            for place, code in enumerate(codes):
                meant[row, block * 32 + place] = table[code] * 2.0**exponent
            for pair in range(16):
                byte = codes[2 * pair] | codes[2 * pair + 1] << 4
                packed[row, block * 16 + pair] = byte - 256 if byte > 127 else byte
    return packed, exponents, meant


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with fp8 linears, fp4 experts, everything else plain; and what it means."""
    folder = tmp_path_factory.mktemp("quantized")
    meant, stored = plain(), {}
    for name, value in meant.items():
        if not is_linear(name):
            stored[name] = value
        elif ".experts." in name:
            stored[name], exponents, meant[name] = quantize_fp4(value)
            stored[scale_name(name)] = exponents.view(torch.float8_e8m0fnu)
        else:
            stored[name], stored[scale_name(name)], meant[name] = quantize_fp8(value)
    table = RandomTensors(CONFIG).tensor("layers.0.ffn.gate.tid2eid")
    save_file(stored | {"layers.0.ffn.gate.tid2eid": table}, folder / "model.safetensors")
    return folder, meant


def test_every_weight_is_what_its_codes_and_scales_mean(
    written: tuple[Path, dict[str, Tensor]],
) -> None:
    """A wrong nibble order or block edge gives a model that talks nonsense fluently."""
    folder, meant = written
    assert sum(is_linear(name) for name in meant) > 20
    with Checkpoint(folder, CONFIG) as checkpoint:
        for name, value in meant.items():
            assert torch.equal(checkpoint.tensor(name), value), name


def test_the_hugging_face_spelling_loads_alike(
    written: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    folder, meant = written
    renamed = {
        name.replace(".scale", ".weight_scale_inv"): value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, CONFIG) as checkpoint:
        name = "layers.1.ffn.experts.2.w2.weight"
        assert torch.equal(checkpoint.tensor(name), meant[name])


def test_scales_as_bytes_and_as_e8m0_mean_the_same() -> None:
    packed = torch.tensor([[0x21, -1] * 8], dtype=torch.int8)
    as_bytes = torch.tensor([[128]], dtype=torch.uint8)
    values = dequantized(packed, as_bytes)
    assert values[0, :4].tolist() == [1.0, 2.0, -12.0, -12.0]
    assert torch.equal(values, dequantized(packed, as_bytes.view(torch.float8_e8m0fnu)))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("layers.0.attn.wkv.scale", torch.ones(9, 9), r"wkv.scale has shape \[9, 9\]"),
        ("layers.0.attn.wkv.scale", torch.full((1, 2), torch.nan), "wkv.weight holds values"),
        ("layers.0.attn.wkv.scale", torch.ones(1, 2, dtype=torch.int64), "is stored as I64"),
        ("layers.0.attn.wkv.weight", torch.zeros(16, 80, dtype=torch.int8), "is stored as I8"),
    ],
)
def test_scales_that_cannot_be_are_refused_by_name(
    written: tuple[Path, dict[str, Tensor]],
    tmp_path: Path,
    name: str,
    value: Tensor,
    sentence: str,
) -> None:
    from safetensors.torch import load_file

    stored = load_file(written[0] / "model.safetensors")
    save_file(stored | {name: value}, tmp_path / "model.safetensors")
    with (
        pytest.raises(ModelLoadError, match=sentence),
        Checkpoint(tmp_path, CONFIG) as checkpoint,
    ):
        checkpoint.tensor("layers.0.attn.wkv.weight")
