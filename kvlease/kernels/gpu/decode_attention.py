# pyright: basic
"""Decode attention: one query row a sequence over its window ring and rows of the cache.

The keys of a row are shared out over enough programs to fill the device, whatever the batch; what
they leave is joined in a second, short launch that is already waiting when the first ends.
"""

import torch
from torch import Tensor

from kvlease.kernels.gpu.attention_core import Turn
from kvlease.kernels.gpu.attention_launch import Listed, Plan, Ring, Rows, Visible, launch


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
        plan = plan_decode(rows, chosen, window_keys)
    launch(rows, window, chosen, turn, plan, window_keys)
    return rows.out


def plan_decode(rows: Rows, chosen: Listed | Visible | None, window_keys: int) -> Plan:
    """Choose tiles and shares from what is known before the step: batch, heads, most keys."""
    batch, num_heads, _ = rows.q.shape
    far = 0
    if isinstance(chosen, Listed):
        far = chosen.index.shape[1]
    elif chosen is not None:
        far = chosen.table.shape[1] * chosen.pool.page_rows
    is_packed = chosen is not None and chosen.pool.is_packed
    heads = 64 if num_heads > 32 else 16
    keys = 32 if is_packed or heads == 16 else 64
    tiles = -(-window_keys // keys) + -(-far // keys)
    groups = -(-num_heads // heads) * batch
    splits = max(1, min(tiles, _processors(rows.q) // groups))
    return Plan(heads, keys, splits, 8 if heads == 64 else 4, 2)


def _processors(where: Tensor) -> int:
    if where.device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(where.device).multi_processor_count
