"""Choosing the k best keys of each row, the same ones on every machine and in every batch."""

import numpy as np
import torch
from torch import Tensor


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Return the positions of each row's k highest scores, in position order, then -1.

    Shapes: scores [N, L], any float dtype; visible [N] int64, row n sees
    keys 0 .. visible[n] - 1; result [N, k] int64. Where fewer than k keys are visible, all of
    them are chosen and the rest of the row is -1. Scores of unseen keys may be anything.

    Equal scores: the lower position wins (relu makes exact zeros, so ties are common).
    """
    num_keys = scores.shape[1]
    slots = torch.arange(k, device=scores.device)
    if num_keys <= k:
        return torch.where(slots < visible.unsqueeze(1), slots, -1)
    positions = torch.arange(num_keys, device=scores.device)
    unseen = positions >= visible.unsqueeze(1)
    seen = scores.masked_fill(unseen, -torch.inf)
    bar = _kth_best(seen, k)
    above = seen > bar
    level = seen == bar
    # of the keys level with the k-th best, the lowest positions fill what is left of k
    room = k - above.sum(dim=1, keepdim=True)
    chosen = above | (level & (level.cumsum(dim=1) <= room))
    picked = _positions_of(chosen, positions, k)
    return torch.where(picked < visible.unsqueeze(1), picked, -1)


def _positions_of(chosen: Tensor, positions: Tensor, k: int) -> Tensor:
    """Return where each row of ``chosen`` [N, L] is true, [N, k]; exactly k times a row."""
    if chosen.device.type == "cpu":
        # the row-major list of chosen positions is [N, k] in position order
        return chosen.nonzero()[:, 1].view(-1, k)
    # a list of unknown length would make the host wait for the device
    slots = torch.where(chosen, chosen.cumsum(dim=1) - 1, k)
    picked = positions.new_zeros((len(chosen), k + 1))
    return picked.scatter_(1, slots, positions.expand_as(slots))[:, :k]


def _kth_best(seen: Tensor, k: int) -> Tensor:
    """Return each row's k-th highest value, [N, 1]; no entry is NaN."""
    if seen.device.type != "cpu":
        return torch.topk(seen, k, dim=1, sorted=True).values[:, -1:]
    # a selection, not a sort: numpy's is five times faster here than torch's top-k
    place = seen.shape[1] - k
    return torch.from_numpy(np.partition(seen.numpy(), place, axis=1)[:, place : place + 1])
