# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# Triton's language has no types: what a kernel does with them is checked by its tests.
"""The rows of a step as kernels see them: where each stands, and where its sequence's state is.

In a decode step row n is sequence n and brings one token; in a chunk the rows of a sequence lie
one after another.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class StepRows(NamedTuple):
    """Rows of a step, all int32.

    positions [N], -1 for padding; table [B, P] page numbers; slots [B] rings. In a chunk sequences
    [N] names each row's sequence, and starts and lasts [N] are the first and the last position
    that its sequence computes in this step; all three are None in a decode step.
    """

    positions: Tensor
    table: Tensor
    slots: Tensor
    sequences: Tensor | None
    starts: Tensor | None
    lasts: Tensor | None
    table_row: int


class Projected(NamedTuple):
    """Rows times a joined matrix, as parts to be added: parts [S, N, M], bf16 or float32."""

    parts: Tensor
    part: int
    row: int


def projected(values: Tensor) -> Projected:
    """Describe parts [S, N, M]."""
    return Projected(values, values.stride(0), values.stride(1))


@triton.jit
def sequence_of(rows, n):
    """Return which sequence row n belongs to."""
    if rows.sequences is None:
        return n
    else:
        return tl.load(rows.sequences + n)


@triton.jit
def start_of(rows, n, position):
    """Return the first position that row n's sequence computes in this step."""
    if rows.starts is None:
        return position
    else:
        return tl.load(rows.starts + n)


@triton.jit
def add_parts(projected, n, columns, mask, PARTS: tl.constexpr):
    """Return columns of projected rows, float32; n and columns broadcast together."""
    at = projected.parts + n.to(tl.int64) * projected.row + columns
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for p in tl.static_range(1, PARTS):
        total += tl.load(at + p * projected.part, mask=mask, other=0.0).to(tl.float32)
    return total
