"""The grouped output projection: each group of heads through its own low-rank matrix, then one."""

import torch
from torch import Tensor

from kvlease.kernels.linear import linear
from kvlease.kernels.tiling import Tiling


def project_output(heads: Tensor, down: Tensor, up: Tensor, tiling: Tiling) -> Tensor:
    """Return the attention output as one vector of the model's width.

    Shapes: heads [N, H, D]; down [G, R, H * D / G]; up [hidden, G * R]; result [N, hidden].
    Source: DeepSeek-V4's output projection (transformers, `deepseek_v4`).
    """
    num_groups = down.shape[0]
    grouped = heads.reshape(heads.shape[0], num_groups, -1)
    low = [linear(grouped[:, g].contiguous(), down[g], tiling) for g in range(num_groups)]
    return linear(torch.cat(low, dim=1), up, tiling)
