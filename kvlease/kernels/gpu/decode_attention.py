# pyright: basic
"""Decode attention: one query row a sequence over its window ring and rows of the cache.

The keys of a row are shared out over enough programs to fill the device, whatever the batch; what
they leave is joined in a second, short launch that is already waiting when the first ends.
"""

from torch import Tensor

from kvlease.kernels.gpu.attention_core import Turn
from kvlease.kernels.gpu.attention_launch import Listed, Ring, Rows, Visible, launch, work_of
from kvlease.kernels.gpu.attention_plan import Plan, plan_decode


def decode_attention(
    rows: Rows,
    window: Ring | Listed,
    chosen: Listed | Visible | None,
    turn: Turn | None = None,
    *,
    window_keys: int = 128,
    plan: Plan | None = None,
) -> Tensor:
    """Attend each sequence's query row to its window and to rows of its pages; return rows.out.

    Nothing here depends on what the device tensors hold, so a captured launch may be replayed with
    other contents. Rows of padding (position -1) come out as zeros. With ``turn`` the result's
    trailing channels are rotated back to position 0.
    """
    if plan is None:
        plan = plan_decode(work_of(rows, window, chosen, window_keys))
    launch(rows, window, chosen, turn, plan, window_keys)
    return rows.out
