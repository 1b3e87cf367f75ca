"""The repaired interpreter computes bf16 and fp8 as torch does, so that tests may rely on it."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _probe(a, b, product, total, fp8, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    left, right = tl.load(a + index), tl.load(b + index)
    tl.store(product + index, tl.dot(left, right))
    tl.store(total + index, left + right)
    tl.store(fp8 + index, left.to(tl.float32).to(tl.float8e4nv))


def test_bf16_and_fp8_arithmetic(device: str) -> None:
    size = 16
    a, b = (torch.randn(size, size, device=device).bfloat16() * 30 for _ in range(2))
    product = torch.empty(size, size, device=device)
    total = torch.empty_like(a)
    fp8 = torch.empty(size, size, device=device, dtype=torch.float8_e4m3fn)
    _probe[(1,)](a, b, product, total, fp8, SIZE=size)
    torch.testing.assert_close(product, a.float() @ b.float(), rtol=1e-5, atol=1e-2)
    assert torch.equal(total, a + b)
    assert torch.equal(fp8.float(), a.float().to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("value", [0.494, -0.494, 448.0, 0.001])
def test_rounding_carries_into_the_exponent(device: str, value: float) -> None:
    a = torch.full((16, 16), value, device=device, dtype=torch.bfloat16)
    fp8 = torch.empty(16, 16, device=device, dtype=torch.float8_e4m3fn)
    spare = torch.empty(16, 16, device=device), torch.empty_like(a)
    _probe[(1,)](a, a, *spare, fp8, SIZE=16)
    assert torch.equal(fp8.float(), a.float().to(torch.float8_e4m3fn).float())
