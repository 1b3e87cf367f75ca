"""Activations, norms and rotation against per-row references."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kvlease.kernels.activations import (
    clamped_swiglu,
    fold_softmax,
    fold_sum,
    sigmoid,
    silu,
    softplus,
)
from kvlease.kernels.norms import rms_norm, rms_normalize
from kvlease.kernels.rope import (
    RopeSpec,
    Rotation,
    Yarn,
    inverse_frequencies,
    rotate_trailing_,
    rotation,
)
from tests.kernels import naive


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smooth_functions_equal_torch(dtype: torch.dtype) -> None:
    """The seamless forms are the same functions, also far out and at zero."""
    x = torch.cat([torch.linspace(-90, 90, 1001), torch.zeros(1)]).to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    for mine, theirs in ((sigmoid, torch.sigmoid), (silu, F.silu), (softplus, F.softplus)):
        torch.testing.assert_close(mine(x), theirs(x), rtol=tolerance, atol=tolerance)
    assert torch.isfinite(silu(torch.tensor([-1e4, 1e4]))).all()


def test_swiglu_clamps_both_sides() -> None:
    """An unclamped gate or up overflows later products in bf16."""
    gate = torch.tensor([20.0, -20.0, 1.0], dtype=torch.float64)
    up = torch.tensor([-20.0, 20.0, 1.0], dtype=torch.float64)
    wanted = F.silu(torch.tensor([2.0, -20.0, 1.0]).double()) * torch.tensor([-2.0, 2.0, 1.0])
    torch.testing.assert_close(clamped_swiglu(gate, up, 2.0), wanted)


@given(length=st.integers(1, 40), width=st.integers(1, 9))
def test_folding_sums_every_slice_once(length: int, width: int) -> None:
    """A slice left out or taken twice would be a wrong cached row."""
    x = torch.randn((3, length, width), dtype=torch.float64)
    torch.testing.assert_close(fold_sum(x, 1), x.sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fold_softmax(x, 1), x.softmax(1), rtol=1e-12, atol=1e-12)


def test_norms_are_wide_inside_and_keep_float64() -> None:
    """A float64 row that passes through float32 would hide behind 1e-8 of noise."""
    x = torch.randn(5, 24, dtype=torch.float64)
    weight = torch.rand(24, dtype=torch.float64)
    for row, normal, weighted in zip(
        x, rms_normalize(x, 1e-6), rms_norm(x, weight, 1e-6), strict=True
    ):
        torch.testing.assert_close(normal, naive.rms(row, 1e-6), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(weighted, naive.rms(row, 1e-6) * weight, rtol=1e-13, atol=1e-13)
    narrow = rms_norm(x.to(torch.bfloat16), weight.float(), 1e-6)
    assert narrow.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(7, 24), (7, 3, 24)])
def test_rotation_turns_trailing_pairs_only(shape: tuple[int, ...]) -> None:
    """Interleaved pairs, the leading channels untouched, and the inverse undoes it."""
    spec = RopeSpec(dim=8, theta=100.0)
    positions = torch.tensor([0, 1, 2, 50, 999, 3, 12345])
    turn = rotation(positions, inverse_frequencies(spec, torch.float64))
    x = torch.randn(shape, dtype=torch.float64)
    got = rotate_trailing_(x.clone(), turn)
    for n, position in enumerate(positions.tolist()):
        for head in x[n].reshape(-1, 24):
            wanted = naive.rotated(head, position, 100.0, 8)
            assert (got[n].reshape(-1, 24) - wanted).abs().sum(1).min() < 1e-10
    torch.testing.assert_close(got[..., :16], x[..., :16], rtol=0, atol=0)
    torch.testing.assert_close(rotate_trailing_(got, turn.inverse()), x)
    assert isinstance(turn.inverse(), Rotation)


def test_yarn_keeps_fast_waves_and_stretches_slow_ones() -> None:
    """Without the ramp, positions past the trained length alias."""
    plain = inverse_frequencies(RopeSpec(32, 10000.0), torch.float64)
    stretched = inverse_frequencies(RopeSpec(32, 10000.0, Yarn(8.0, 4096)), torch.float64)
    ratio = plain / stretched
    assert ratio[0].item() == pytest.approx(1.0)
    assert ratio[-1].item() == pytest.approx(8.0)
    assert ((ratio[1:] - ratio[:-1]) >= -1e-12).all()
    assert math.isclose(plain[1].item(), 10000.0 ** (-2 / 32))
