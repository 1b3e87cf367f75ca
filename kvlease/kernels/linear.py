"""Products of packed rows, with one matrix or each with its own, in tiles of one shape when exact.

Knows nothing of what the rows mean.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlease.errors import LayoutMismatch
from kvlease.kernels.tiling import Tiling


def linear(rows: Tensor, weight: Tensor, tiling: Tiling) -> Tensor:
    """Return ``rows @ weight.T``.

    Shapes:
        rows [N, K]; weight [M, K]; result [N, M] in the rows' dtype. In exact mode N is a
        multiple of ``tiling.rows`` (pad with zeros).

    Raises:
        LayoutMismatch: N is not such a multiple, or K differs.
    """
    if rows.shape[-1] != weight.shape[1]:
        raise LayoutMismatch(
            f"rows of width {rows.shape[-1]} meet a weight that takes {weight.shape[1]}"
        )
    if not tiling.is_exact:
        return F.linear(rows, weight)
    num_rows = rows.shape[0]
    if num_rows % tiling.rows:
        raise LayoutMismatch(
            f"{num_rows} rows are not a multiple of the tile of {tiling.rows}; pad with zeros"
        )
    transposed = weight.t()
    result = rows.new_empty((num_rows, weight.shape[0]))
    # One product per tile: MKL and oneDNN choose a blocking of the inner sum from the number of
    # rows, so padding alone is not enough once K is large (measured: K >= 512 differs by batch).
    for start in range(0, num_rows, tiling.rows):
        stop = start + tiling.rows
        torch.mm(rows[start:stop], transposed, out=result[start:stop])
    return result


def batched(left: Tensor, right: Tensor, tiling: Tiling, added: Tensor | None = None) -> Tensor:
    """Return ``left[n] @ right[n]``, plus ``added[n]`` where given.

    Shapes: left [N, P, K]; right [N, K, Q]; added and result [N, P, Q]. In exact mode N is a
    multiple of ``tiling.rows``: on a CUDA device the library picks its kernel by the size of the
    batch as well, so that every call takes one tile; on the CPU it does not.
    """
    if not tiling.is_exact or left.device.type == "cpu":
        return torch.bmm(left, right) if added is None else torch.baddbmm(added, left, right)
    result = left.new_empty((left.shape[0], left.shape[1], right.shape[2]))
    for start in range(0, left.shape[0], tiling.rows):
        part = slice(start, start + tiling.rows)
        pair = left[part].contiguous(), right[part].contiguous()
        if added is None:
            torch.bmm(*pair, out=result[part])
        else:
            torch.baddbmm(added[part], *pair, out=result[part])
    return result
