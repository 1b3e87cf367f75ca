"""Residual streams on the device against their twin."""

import pytest
import torch
from torch import Tensor

from kvlease.kernels.gpu.streams import (
    BlockOutput,
    Mixed,
    enter_streams,
    leave_streams,
    pack_mixer,
    spread_tokens,
)
from kvlease.kernels.mhc import MixerNumbers, MixerWeights, enter_block, leave_block, read_head
from kvlease.kernels.norms import rms_norm
from kvlease.kernels.tiling import FAST

NUMBERS = MixerNumbers(4, 20, 1e-6, 1e-6)


def close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert torch.isfinite(got.float()).all()
    assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < tolerance


def mixer(streams: int, width: int, outputs: int, device: str) -> MixerWeights:
    projection = torch.randn(outputs, streams * width, device=device) * (streams * width) ** -0.5
    return MixerWeights(
        projection, torch.rand(outputs, device=device) + 0.5, torch.randn(outputs, device=device)
    )


@pytest.mark.parametrize(
    ("rows", "width", "lanes", "few"), [(1, 64, 4, 64), (17, 16, 2, 64), (5, 192, 4, 4)]
)
def test_a_block_between_two_mixers(
    rows: int, width: int, lanes: int, few: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens spread, a block entered and left again, and the next one entered."""
    monkeypatch.setattr("kvlease.kernels.gpu.streams._FEW", few)
    torch.manual_seed(rows)
    numbers = MixerNumbers(lanes, 20, 1e-6, 1e-6)
    outputs = lanes * (2 + lanes)
    first, second = (mixer(lanes, width, outputs, device) for _ in range(2))
    weight = torch.rand(width, device=device) + 0.5
    embedding = torch.randn(50, width, device=device).bfloat16()
    embedding[40:] = torch.nan
    tokens = torch.randint(40, (rows,), device=device)
    streams = embedding[tokens].unsqueeze(1).repeat(1, lanes, 1)
    spread = spread_tokens(embedding, tokens, lanes, pack_mixer(first))
    assert torch.equal(spread.streams, streams)
    hidden, mixing = enter_streams(spread, pack_mixer(first), weight, numbers)
    entered, wanted = enter_block(streams, first, numbers, FAST)
    close(hidden, rms_norm(entered, weight, 1e-6), 6e-3)
    close(mixing[:, :lanes], wanted.post, 1e-4)
    close(mixing[:, lanes:].view_as(wanted.comb), wanted.comb, 1e-4)
    parts = torch.randn(3, rows, width, device=device)
    left = leave_streams(streams, BlockOutput(parts), mixing, pack_mixer(second))
    after = leave_block(streams, parts.sum(0).bfloat16(), wanted, FAST)
    close(left.streams, after, 6e-3)
    again, _ = enter_streams(left, pack_mixer(second), weight, numbers)
    close(again, rms_norm(enter_block(after, second, numbers, FAST)[0], weight, 1e-6), 1.5e-2)


def test_the_head_reads_without_writing_back(device: str) -> None:
    torch.manual_seed(5)
    head, width = mixer(4, 64, 4, device), 64
    embedding = torch.randn(9, width, device=device).bfloat16()
    tokens = torch.arange(5, device=device)
    weight = torch.ones(width, device=device)
    spread = spread_tokens(embedding, tokens, 4, pack_mixer(head))
    hidden, _ = enter_streams(spread, pack_mixer(head), weight, NUMBERS)
    wanted = read_head(spread.streams, head, NUMBERS, FAST)
    close(hidden, rms_norm(wanted, weight, 1e-6), 6e-3)
    assert isinstance(spread, Mixed)
