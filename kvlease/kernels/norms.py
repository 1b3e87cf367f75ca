"""Root-mean-square norms, with the arithmetic in float32 or wider.

A float64 input stays float64 all through.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over ``dtype`` values are carried: float32 or float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dim, in x's dtype.

    Shapes: x [..., D]; weight [D], float32 (float64 for float64 x).
    """
    wide = x.to(accumulate_dtype(x.dtype))
    return F.rms_norm(wide, (x.shape[-1],), weight, eps).to(x.dtype)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) over the last dim, without a weight, in x's dtype. Shapes: x [..., D]."""
    wide = x.to(accumulate_dtype(x.dtype))
    return F.rms_norm(wide, (x.shape[-1],), None, eps).to(x.dtype)
