# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""Products of few rows with a large matrix: as fast as the matrix can be read.

The matrix is the long side of the instruction, so that up to 16 rows cost what one does. Sums are
cut into shares where there would be too few programs; whoever reads the result adds them up. On an
H200 a cold matrix is read at 2.3 TB/s (12 MB) to 4.5 TB/s (1 GB), 5 to 40 % faster than by cuBLAS.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvlease.kernels.gpu.early import early_launch, fetch_lines, wait_for_inputs

FEW = 64
"""Up to so many rows this is faster than a library's product."""
_PROGRAMS = 128
"""About one for each multiprocessor of the largest chips at hand: fewer leave memory idle.

Where rows are so few that two programs fit on each, twice as many.
"""


def multiprocessors(device: torch.device) -> int:
    """Return how many a device has; 1 where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_side(num_rows: int) -> int:
    """Return the short side of the instruction that so many rows take."""
    return max(16, 1 << (num_rows - 1).bit_length())


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    rows, weight, out, num_rows, row, group, weight_group, out_row, part, M: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SHARES: tl.constexpr,
    STAGES: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply BM rows with BN of the matrix's rows over one share of the inner sum."""
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    share = tl.program_id(1)
    g = tl.program_id(2).to(tl.int64)
    lanes = tl.arange(0, BM)
    DEEP: tl.constexpr = (K + SHARES * BK - 1) // (SHARES * BK) * BK
    deep = share * DEEP + tl.arange(0, BK)
    total = tl.zeros((BN, BM), tl.float32)
    inside = (outputs < M)[:, None]
    real = (lanes < num_rows)[:, None]
    begin = weight + g * weight_group + outputs.to(tl.int64) * K + share * DEEP
    fetch_lines(begin, outputs < M, LINES, EARLY)
    wait_for_inputs(EARLY)
    matrix = begin[:, None] + tl.arange(0, BK)[None, :]
    vector = rows + g * group + lanes.to(tl.int64)[:, None] * row + deep[None, :]
    for k in tl.range(0, DEEP, BK, num_stages=STAGES):
        within = (deep + k < K)[None, :]
        w = tl.load(matrix + k, mask=inside & within, other=0.0, eviction_policy="evict_first")
        x = tl.load(vector + k, mask=real & within, other=0.0)
        total = tl.dot(w, x.T, total)
    at = share * part + lanes.to(tl.int64)[None, :] * out_row + g * M + outputs[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside & (lanes < num_rows)[None, :])


def multiply_few(rows: Tensor, weight: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return up to 64 rows times each group's matrix, in shares to be added.

    Shapes: rows [N, G * K] bf16, groups side by side; weight [M, K] or [G, M, K] bf16; result
    [shares, N, G * M]. A bf16 result has one share.
    """
    num_rows = len(rows)
    stacked = weight if weight.ndim == 3 else weight.unsqueeze(0)
    groups, outputs, deep = stacked.shape
    tall = 64 if outputs >= 64 else 16
    blocks = triton.cdiv(outputs, tall) * groups
    side = rows_side(num_rows)
    # many short programs of many rows: less memory each, so that more of them run at once
    is_short = side >= 64 and deep <= 1024 and blocks > 2 * _PROGRAMS
    if is_short and blocks <= 4 * _PROGRAMS:
        # half as many, so that all run at once: two on each multiprocessor
        tall = 2 * tall
    wide = 64 if is_short else 128
    step = min(wide, triton.next_power_of_2(deep))
    shares = 1
    if dtype != torch.bfloat16:
        programs = _PROGRAMS if side > 16 else 2 * _PROGRAMS
        most = min(triton.cdiv(programs, blocks), deep // (2 * step))
        while 2 * shares <= most:
            shares *= 2
    out = rows.new_empty((shares, num_rows, groups * outputs), dtype=dtype)
    _few_rows[(triton.cdiv(outputs, tall), shares, groups)](
        rows, stacked, out, num_rows, rows.stride(0), deep if groups > 1 else 0,
        stacked.stride(0), out.stride(1), out.stride(0), M=outputs, K=deep,
        BM=side, BN=tall, BK=step, SHARES=shares, STAGES=5 if side < 64 else 4,
        LINES=min(8, step // 16), num_warps=4, **early_launch(_few_rows),
    )  # fmt: skip
    return out
