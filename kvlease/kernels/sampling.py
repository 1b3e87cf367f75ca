"""Drawing one token per row of logits; each row's draw depends on nothing but that row.

The random number is keyed by (seed, position of the new token), so the same request draws the same
tokens alone, batched, or again after preemption.
"""

import hashlib
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from kvlease.kernels.counter_rng import uniforms
from kvlease.kernels.placing import place
from kvlease.protocols.ports import SampledToken, Sampling


def sample_tokens(
    logits: Tensor, how: Sequence[Sampling], positions: Sequence[int], *, digests: bool
) -> list[SampledToken]:
    """Return the token drawn for every row.

    Shapes: logits [S, V], float32 or float64, unchanged afterwards; how and positions S each,
    positions being those of the new tokens. ``digests`` adds a hash of each row as it came in.
    """
    hashes = [digest_of(row) for row in logits] if digests else [None] * len(how)
    allowed = ban(logits, how)
    # the lowest token among equals
    tokens = cast("list[int]", allowed.argmax(dim=1).tolist())
    drawn = [row for row, way in enumerate(how) if way.temperature > 0]
    if drawn:
        found = _draw(
            allowed[drawn].double(), [how[r] for r in drawn], [positions[r] for r in drawn]
        )
        for row, token in zip(drawn, found, strict=True):
            tokens[row] = token
    return [
        _describe(allowed[row], token, way, hashes[row])
        for row, (token, way) in enumerate(zip(tokens, how, strict=True))
    ]


def ban(logits: Tensor, how: Sequence[Sampling]) -> Tensor:
    """Return the logits with -inf for banned tokens; the same tensor where none is banned."""
    width = logits.shape[1]
    banned = [row * width + token for row, way in enumerate(how) for token in way.banned]
    if not banned:
        return logits
    allowed = logits.clone(memory_format=torch.contiguous_format)
    allowed.view(-1).index_fill_(0, place(torch.tensor(banned), logits.device), -torch.inf)
    return allowed


def digest_of(row: Tensor) -> bytes:
    """Return a hash of one row of logits in host memory."""
    return hashlib.blake2b(row.contiguous().numpy().tobytes(), digest_size=16).digest()


def _draw(logits: Tensor, how: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Return one token per row by inverting the cumulated probabilities at the row's number."""
    chance = uniforms([way.seed for way in how], positions).tolist()
    tokens: list[int] = []
    for row, way, point in zip(logits, how, chance, strict=True):
        scaled = row / way.temperature
        order: Tensor | None = None
        if way.top_k > 0 or way.top_p < 1.0:
            scaled, order = _keep(scaled, way)
        place = _invert(scaled.softmax(dim=0), point)
        tokens.append(place if order is None else int(order[place]))
    return tokens


def _keep(scaled: Tensor, way: Sampling) -> tuple[Tensor, Tensor]:
    """Return the logits that pass top-k and top-p, best first, and their tokens."""
    ranked, order = torch.sort(scaled, descending=True, stable=True)
    if way.top_k > 0:
        ranked, order = ranked[: way.top_k], order[: way.top_k]
    if way.top_p < 1.0:
        shares = ranked.softmax(dim=0)
        before = shares.cumsum(dim=0) - shares
        kept = max(int((before < way.top_p).sum()), 1)
        ranked, order = ranked[:kept], order[:kept]
    return ranked, order


def _invert(shares: Tensor, point: float) -> int:
    sums = shares.cumsum(dim=0)
    place = int(torch.searchsorted(sums, point * sums[-1:], right=True))
    # rounding may carry the point past the last token that has any share
    return min(place, int(shares.nonzero()[-1]))


def _describe(row: Tensor, token: int, way: Sampling, digest: bytes | None) -> SampledToken:
    if way.logprobs is None:
        return SampledToken(token, digest=digest)
    shares = row.double().log_softmax(dim=0)
    top: tuple[tuple[int, float], ...] = ()
    if way.logprobs > 0:
        ranked, order = torch.sort(shares, descending=True, stable=True)
        names = cast("list[int]", order[: way.logprobs].tolist())
        values = cast("list[float]", ranked[: way.logprobs].tolist())
        top = tuple(zip(names, values, strict=True))
    return SampledToken(token, float(shares[token]), top, digest)
