"""Attention of each query row over its own keys, with a sink, keys being values.

The keys come in blocks (the window, then chosen or compressed rows) whose places are fixed by
geometry and position, never by the batch. What a block means is the caller's.
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.linear import batched
from kvlease.kernels.tiling import Tiling


@frozen
class KeyBlock:
    """Keys of N query rows, and which of them each row sees.

    Shapes: keys [N, L, D], or [1, L, D] shared by all rows; seen [N, L] bool, None for all.
    Unseen keys take memory and time but no weight; they must be finite (zeros, or rows the query
    sees anyway).
    """

    keys: Tensor
    seen: Tensor | None


def sparse_attention(
    queries: Tensor, sinks: Tensor, blocks: Sequence[KeyBlock], scale: float, tiling: Tiling
) -> Tensor:
    """Return softmax(scale * q.k, joined by the head's sink) times the keys.

    Shapes:
        queries [N, H, D]; sinks [H]; result [N, H, D]; all float32 or all float64. Blocks as in
        `KeyBlock`; in exact mode every block but the first is cut into tiles of ``tiling.keys``.
    Source: DeepSeek-V4's attention (transformers, `deepseek_v4`); the sink takes probability
    and adds no value.
    """
    tiles = [_spread(tile, len(queries)) for tile in _tiled(blocks, tiling)]
    num_rows, num_heads, _ = queries.shape
    scaled = queries * scale
    # the sink comes first so that a longer tail of masked keys moves nothing before it
    logits = [sinks.view(1, -1, 1).expand(num_rows, num_heads, 1)]
    for tile in tiles:
        matches = batched(scaled, tile.keys.transpose(1, 2), tiling)
        if tile.seen is not None:
            matches.masked_fill_(tile.seen.logical_not().unsqueeze(1), -torch.inf)
        logits.append(matches)
    weights = torch.cat(logits, dim=2).softmax(dim=2)
    result: Tensor | None = None
    start = 1
    for tile in tiles:
        stop = start + tile.keys.shape[1]
        part = weights[:, :, start:stop].contiguous()
        result = batched(part, tile.keys, tiling, result)
        start = stop
    return torch.zeros_like(queries) if result is None else result


def _tiled(blocks: Sequence[KeyBlock], tiling: Tiling) -> list[KeyBlock]:
    """Cut every block but the first so that each product over keys has one of few shapes."""
    if not tiling.is_exact:
        return list(blocks)
    tiles = list(blocks[:1])
    for block in blocks[1:]:
        length = block.keys.shape[1]
        for start in range(0, length, tiling.keys):
            stop = min(start + tiling.keys, length)
            seen = None if block.seen is None else block.seen[:, start:stop]
            tiles.append(KeyBlock(block.keys[:, start:stop], seen))
    return tiles


def _spread(block: KeyBlock, num_rows: int) -> KeyBlock:
    if block.keys.shape[0] == num_rows:
        return block
    return KeyBlock(block.keys.expand(num_rows, -1, -1), block.seen)
