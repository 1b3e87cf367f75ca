"""Per-row references in plain loops and float64: the definition, without any batching."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def rms(x: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(float((x.double() ** 2).mean()) + eps)


def rotated(x: Tensor, position: int, theta: float, dim: int) -> Tensor:
    """Turn the last ``dim`` channels of one vector, pair by pair."""
    out = x.double().clone()
    start = len(x) - dim
    for pair in range(dim // 2):
        angle = position * theta ** (-2 * pair / dim)
        a, b = out[start + 2 * pair].item(), out[start + 2 * pair + 1].item()
        out[start + 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        out[start + 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def pooled(values: Tensor, gates: Tensor) -> Tensor:
    """Channel by channel: softmax of the gates over slots, times the values."""
    out = torch.zeros(values.shape[1], dtype=torch.float64)
    for channel in range(values.shape[1]):
        weights = [math.exp(float(g)) for g in gates[:, channel]]
        total = sum(weights)
        out[channel] = sum(
            w / total * float(v) for w, v in zip(weights, values[:, channel], strict=True) if w
        )
    return out


def index_score(query: Tensor, weights: Tensor, key: Tensor) -> float:
    return sum(
        float(w) * max(float(q.double() @ key.double()), 0.0)
        for w, q in zip(weights, query, strict=True)
    )


def topk(scores: Sequence[float], k: int) -> list[int]:
    """Best first by (score, lower position), then listed in position order, then -1."""
    best = sorted(range(len(scores)), key=lambda p: (-scores[p], p))[:k]
    return sorted(best) + [-1] * (k - len(best))


def attention(query: Tensor, sink: Tensor, keys: Sequence[Tensor], scale: float) -> Tensor:
    """One row: all heads over a list of keys, with a sink that takes weight and gives nothing."""
    out = torch.zeros_like(query, dtype=torch.float64)
    for head in range(query.shape[0]):
        logits = [float(query[head].double() @ key.double()) * scale for key in keys]
        top = max([*logits, float(sink[head])])
        weights = [math.exp(logit - top) for logit in logits]
        total = sum(weights) + math.exp(float(sink[head]) - top)
        for weight, key in zip(weights, keys, strict=True):
            out[head] += weight / total * key.double()
    return out


def sinkhorn(matrix: Tensor, iterations: int, eps: float) -> Tensor:
    m = [[float(v) for v in row] for row in matrix]
    size = len(m)

    def columns() -> None:
        for j in range(size):
            total = sum(m[i][j] for i in range(size)) + eps
            for i in range(size):
                m[i][j] /= total

    def rows() -> None:
        for i in range(size):
            total = sum(m[i]) + eps
            m[i] = [v / total for v in m[i]]

    columns()
    for _ in range(iterations - 1):
        rows()
        columns()
    return torch.tensor(m, dtype=torch.float64)


def expert(row: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float) -> Tensor:
    """One gated network on one row, clamped."""
    g = (gate.double() @ row.double()).clamp(max=limit)
    u = (up.double() @ row.double()).clamp(min=-limit, max=limit)
    return down.double() @ (g / (1 + torch.exp(-g)) * u)
