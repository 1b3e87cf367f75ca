"""Row formats: sizes, rounding, and that nothing but the row itself decides its bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import LayoutMismatch
from kvlease.kernels.formats import decode_rows, encode_rows, storage_dtype, storage_width
from kvlease.protocols.schema import RowFormat

FLASH = RowFormat("fp8_latent", 512, 64)
INDEX = RowFormat("fp8_index", 128)


def test_sizes_at_flash_geometry() -> None:
    """Transfers and pools count these bytes."""
    assert storage_width(FLASH) == 584
    assert storage_width(INDEX) == 132
    rows = torch.randn(3, 512)
    assert encode_rows(rows, FLASH).shape == (3, 584)
    assert encode_rows(rows[:, :128], INDEX).shape == (3, 132)
    assert storage_dtype(FLASH) == torch.uint8


@pytest.mark.parametrize("encoding", ["float64", "float32", "bfloat16"])
def test_plain_rows_are_their_dtype(encoding: str) -> None:
    fmt = RowFormat(encoding, 6)  # type: ignore[arg-type]
    rows = torch.randn(4, 6, dtype=torch.float64)
    stored = encode_rows(rows, fmt)
    assert stored.dtype == storage_dtype(fmt)
    torch.testing.assert_close(decode_rows(stored, fmt, torch.float64), stored.double())


@given(
    width=st.integers(2, 200),
    rope=st.integers(0, 20),
    exponent=st.integers(-60, 60),
    seed=st.integers(0, 1000),
)
def test_fp8_latent_is_within_one_part_in_sixteen(
    width: int, rope: int, exponent: int, seed: int
) -> None:
    """e4m3 has three mantissa bits; scales are powers of two, so half a step is 1/16 relative."""
    rope = min(2 * (rope // 2), width - 1)
    fmt = RowFormat("fp8_latent", width, rope)
    rows = torch.randn((3, width), generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    stored = encode_rows(rows, fmt)
    assert stored.shape == (3, fmt.nbytes)
    back = decode_rows(stored, fmt, torch.float32)
    nope = width - rope
    for start in range(0, nope, 64):
        tile = slice(start, min(start + 64, nope))
        error, size = (back - rows)[:, tile].abs(), rows[:, tile].abs()
        # below the smallest normal, steps are equal: 2^-9 of the scale, itself <= amax / 224
        floor = size.amax(1, keepdim=True) / 224 * 2.0**-10
        assert (error <= torch.maximum(size / 16, floor)).all()
    torch.testing.assert_close(back[:, nope:], rows[:, nope:].bfloat16().float(), rtol=0, atol=0)
    again = decode_rows(encode_rows(back, fmt), fmt, torch.float32)
    assert torch.equal(again, back), "storing what was read must change nothing"


def test_fp8_keeps_zeros_and_the_largest_value() -> None:
    """A scale one step too small turns the largest value into NaN."""
    fmt = RowFormat("fp8_latent", 64, 0)
    rows = torch.zeros(4, 64)
    rows[1, 5], rows[2, 6], rows[3, 7] = 448.0, 448.0001, -1e-30
    back = decode_rows(encode_rows(rows, fmt), fmt, torch.float32)
    assert torch.isfinite(back).all()
    assert (back[0] == 0).all()
    assert back[1, 5].item() == 448.0
    index = RowFormat("fp8_index", 64)
    back = decode_rows(encode_rows(rows, index), index, torch.float32)
    assert torch.isfinite(back).all()
    torch.testing.assert_close(back, rows, rtol=1e-6, atol=1e-36)


def test_a_row_is_encoded_alone() -> None:
    """Bytes that depend on a neighbour would break sharing and exactness."""
    rows = torch.randn(40, 128)
    for fmt in (RowFormat("fp8_latent", 128, 32), INDEX):
        together = encode_rows(rows, fmt)
        assert all(torch.equal(encode_rows(rows[n : n + 1], fmt)[0], together[n]) for n in (0, 39))


def test_poison_reads_as_not_a_number() -> None:
    """Unwritten rows must not look like data in any format."""
    for fmt in (FLASH, INDEX, RowFormat("bfloat16", 8)):
        stored = torch.full((1, storage_width(fmt)), 0, dtype=storage_dtype(fmt))
        stored.view(torch.uint8).fill_(0xFF)
        assert torch.isnan(decode_rows(stored, fmt, torch.float32)).all()


def test_wrong_widths_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="100 values"):
        encode_rows(torch.zeros(1, 100), FLASH)
    with pytest.raises(LayoutMismatch, match="583 elements"):
        decode_rows(torch.zeros(1, 583, dtype=torch.uint8), FLASH, torch.float32)
    with pytest.raises(LayoutMismatch, match="not computed"):
        encode_rows(torch.zeros(1, 1), RowFormat("byte", 1))
    with pytest.raises(LayoutMismatch, match="not computed"):
        decode_rows(torch.zeros(1, 1), RowFormat("byte", 1), torch.float32)
