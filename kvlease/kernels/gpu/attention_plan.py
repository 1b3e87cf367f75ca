# pyright: basic
"""How attention's work is cut, from what is known before a step: rows, heads, most keys, device."""

from typing import Literal

import torch
from attrs import frozen

_MOST_TILES, _MOST_PACKED_TILES = 5, 3
"""Tiles of 32 keys that the narrow schedule holds at once, of plain and of packed rows."""


@frozen
class Plan:
    """How the work is cut: heads and keys of a tile, shares of a row's keys, warps, stages.

    schedule: "simple" leaves it to Triton; "wide" is written out for Hopper, with tiles of 64
    heads, and of 64 plain keys or 32 packed ones; "narrow" asks for all keys of a share at once,
    with a warp for each four heads.
    """

    heads: int
    keys: int
    splits: int
    warps: int
    stages: int = 2
    schedule: Literal["simple", "wide", "narrow"] = "simple"


@frozen
class Work:
    """Sizes of a step: query rows, heads, channels; most keys of a row in the window and beyond."""

    rows: int
    heads: int
    width: int
    near: int
    far: int
    is_packed: bool
    device: torch.device

    def tiles(self, keys: int) -> int:
        """Return how many tiles of so many keys a row can have."""
        return -(-self.near // keys) + -(-self.far // keys)

    def room(self, heads: int) -> int:
        """Return how many programs of so many heads the device has for each row; at least one."""
        programs = self.rows * -(-self.heads // heads)
        return max(1, processors(self.device) // programs)

    @property
    def is_hopper(self) -> bool:
        """Whether the schedules written out for Hopper's matrix units and these widths apply."""
        if self.device.type != "cuda" or self.width != 512:
            return False
        return torch.cuda.get_device_capability(self.device)[0] == 9


def plan_decode(work: Work) -> Plan:
    """Cut few rows so that the whole device takes part."""
    if work.is_hopper:
        for heads in (16, 32) if work.is_packed else (16,):
            tiles = -(-work.tiles(32) // work.room(heads))
            if tiles <= (_MOST_PACKED_TILES if work.is_packed else _MOST_TILES):
                splits = -(-work.tiles(32) // tiles)
                return Plan(heads, 32, splits, heads // 4, schedule="narrow")
    if work.is_hopper and work.heads > 32:
        # a share of one tile costs more to join than it saves
        splits = min(-(-work.tiles(64) // 2), work.room(64))
        return Plan(64, 64, max(1, splits), 8, schedule="wide")
    heads = 64 if work.heads > 32 else 16
    keys = 32 if work.is_packed or heads == 16 else 64
    return Plan(heads, keys, min(work.tiles(keys), work.room(heads)), 8 if heads == 64 else 4)


def plan_prefill(work: Work) -> Plan:
    """Cut many rows: each has a program of its own for each group of heads."""
    if work.is_hopper and work.heads > 32:
        return Plan(64, 64, 1, 8, schedule="wide")
    if work.heads > 32:
        return Plan(64, 32 if work.is_packed else 64, 1, 8)
    return Plan(16, 32, 1, 4)


def processors(device: torch.device) -> int:
    """Return how many programs of a large kernel a device runs at once."""
    if device.type != "cuda":
        return 8
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
