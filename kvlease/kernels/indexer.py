"""Scores of the sparse-attention indexer: sum over heads of w_h * relu(q_h . k).

Visibility is the caller's; every key given is scored.
"""

from torch import Tensor

from kvlease.kernels.linear import batched
from kvlease.kernels.tiling import Tiling


def index_scores(queries: Tensor, head_weights: Tensor, keys: Tensor, tiling: Tiling) -> Tensor:
    """Return each row's score of each key.

    Shapes:
        queries [N, H, D]; head_weights [N, H], with every scale already in; keys [N, L, D], or
        [1, L, D] shared by all rows. float32 or float64. Result [N, L]. In exact mode L is a
        multiple of ``tiling.keys`` and N of ``tiling.rows``.
    Source: DeepSeek-V4's lightning indexer (transformers, `deepseek_v4`).
    """
    num_rows, num_heads, width = queries.shape
    num_keys = keys.shape[1]
    if not tiling.is_exact or num_keys == tiling.keys:
        return _scores_of_tile(queries, head_weights, keys, tiling)
    if keys.shape[0] == num_rows:
        # all tiles of all rows as one batch of products of one shape
        tiles = num_keys // tiling.keys
        flat = _scores_of_tile(
            queries.unsqueeze(1).expand(-1, tiles, -1, -1).reshape(-1, num_heads, width),
            head_weights.unsqueeze(1).expand(-1, tiles, -1).reshape(-1, num_heads),
            keys.reshape(-1, tiling.keys, width),
            tiling,
        )
        return flat.view(num_rows, num_keys)
    scores = queries.new_empty((num_rows, num_keys))
    for start in range(0, num_keys, tiling.keys):
        stop = start + tiling.keys
        tile = keys[:, start:stop]
        scores[:, start:stop] = _scores_of_tile(queries, head_weights, tile, tiling)
    return scores


def _scores_of_tile(queries: Tensor, head_weights: Tensor, keys: Tensor, tiling: Tiling) -> Tensor:
    if keys.shape[0] != queries.shape[0]:
        keys = keys.expand(queries.shape[0], -1, -1)
    matches = batched(queries, keys.transpose(1, 2), tiling).relu_()
    return batched(head_weights.unsqueeze(1), matches, tiling).squeeze(1)
