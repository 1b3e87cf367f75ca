"""Drawing tokens on the model's device without waiting for it; the twin is in ``sampling``.

All rows are drawn together, in float64, by the same rules; only the order of additions differs, so
a draw differs where a row's random number falls on the border of two tokens to the last bits.
"""

from collections.abc import Sequence
from typing import cast, final

import torch
from torch import Tensor

from kvlease.kernels.counter_rng import uniforms
from kvlease.kernels.placing import fetch, place
from kvlease.kernels.sampling import ban, digest_of
from kvlease.protocols.ports import SampledToken, Sampling

_NO_FILTER = 2.0
"""A top-p above every sum of shares."""


@final
class PendingDraw:
    """Tokens drawn in the order of a stream; readable once the stream's work is done."""

    def __init__(
        self, logits: Tensor, how: Sequence[Sampling], positions: Sequence[int], *, digests: bool
    ) -> None:
        """Launch the draw of every row; nothing here waits.

        Ownership: keeps host copies of what it will tell; the logits may change in stream order
        afterwards. Shapes: logits [S, V], float32 or float64; how and positions S each.
        """
        self._how = how
        self._rows = fetch(logits) if digests else None
        allowed = ban(logits, how)
        tokens = draw_rows(allowed, how, positions)
        self._tokens = fetch(tokens)
        self._told = [row for row, way in enumerate(how) if way.logprobs is not None]
        self._logprobs: tuple[Tensor, Tensor, Tensor] | None = None
        if self._told:
            most = max(way.logprobs or 0 for way in how)
            self._logprobs = _log_probabilities(allowed, tokens, self._told, most)

    def collect(self) -> list[SampledToken]:
        """Return the token of every row; the stream's work must have ended."""
        tokens = cast("list[int]", self._tokens.tolist())
        digests = [None] * len(tokens) if self._rows is None else [*map(digest_of, self._rows)]
        drawn = [SampledToken(t, digest=d) for t, d in zip(tokens, digests, strict=True)]
        if self._logprobs is not None:
            own, values, names = (cast("list[list[float]]", t.tolist()) for t in self._logprobs)
            for place_, row in enumerate(self._told):
                count = self._how[row].logprobs
                pairs = zip(names[place_][:count], values[place_][:count], strict=True)
                top = tuple((int(name), value) for name, value in pairs)
                drawn[row] = SampledToken(tokens[row], own[place_][0], top, digests[row])
        return drawn


def draw_rows(allowed: Tensor, how: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Return the token drawn for every row, [S] int64 on the rows' device; never waits for it.

    Shapes: allowed [S, V], -inf for what must not be drawn.
    """
    tokens = allowed.argmax(dim=1)  # the lowest token among equals
    drawn = [row for row, way in enumerate(how) if way.temperature > 0]
    plain = [row for row in drawn if how[row].top_k <= 0 and how[row].top_p >= 1.0]
    for rows, picks in ((plain, _draw_plain), (sorted({*drawn} - {*plain}), _draw_filtered)):
        if rows:
            index = place(torch.tensor(rows), allowed.device)
            ways = [how[row] for row in rows]
            numbers = torch.tensor([way.temperature for way in ways], dtype=torch.float64)
            scaled = allowed.index_select(0, index).double() / _column(numbers, allowed.device)
            chance = uniforms([w.seed for w in ways], [positions[row] for row in rows])
            points = _column(torch.from_numpy(chance), allowed.device)
            tokens.index_copy_(0, index, picks(scaled, points, ways))
    return tokens


def _column(numbers: Tensor, device: torch.device) -> Tensor:
    return place(numbers, device).unsqueeze(1)


def _draw_plain(scaled: Tensor, points: Tensor, ways: Sequence[Sampling]) -> Tensor:
    return _invert(scaled.softmax(dim=1), points).squeeze(1)


def _draw_filtered(scaled: Tensor, points: Tensor, ways: Sequence[Sampling]) -> Tensor:
    """Draw among the tokens that pass each row's top-k and top-p, best first."""
    width, device = scaled.shape[1], scaled.device
    ranked, order = torch.sort(scaled, dim=1, descending=True, stable=True)
    slots = torch.arange(width, device=device)
    top_k = torch.tensor([way.top_k if way.top_k > 0 else width for way in ways])
    ranked = ranked.masked_fill(slots >= _column(top_k, device), -torch.inf)
    shares = ranked.softmax(dim=1)
    before = shares.cumsum(dim=1) - shares
    top_p = [way.top_p if way.top_p < 1.0 else _NO_FILTER for way in ways]
    bars = _column(torch.tensor(top_p, dtype=torch.float64), device)
    kept = (before < bars).sum(dim=1, keepdim=True).clamp(min=1)
    ranked = ranked.masked_fill(slots >= kept, -torch.inf)
    return order.gather(1, _invert(ranked.softmax(dim=1), points)).squeeze(1)


def _invert(shares: Tensor, points: Tensor) -> Tensor:
    """Return where each row's cumulated shares pass its point, [S, 1]."""
    sums = shares.cumsum(dim=1)
    places = torch.searchsorted(sums, points * sums[:, -1:], right=True)
    slots = torch.arange(shares.shape[1], device=shares.device)
    # rounding may carry the point past the last token that has any share
    last = torch.where(shares > 0, slots, 0).amax(dim=1, keepdim=True)
    return torch.minimum(places, last)


def _log_probabilities(
    allowed: Tensor, tokens: Tensor, rows: Sequence[int], most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the drawn tokens' log-probabilities [R, 1], and the best ones with names [R, most]."""
    index = place(torch.tensor(rows), allowed.device)
    shares = allowed.index_select(0, index).double().log_softmax(dim=1)
    own = shares.gather(1, tokens.index_select(0, index).unsqueeze(1))
    values, names = torch.sort(shares, dim=1, descending=True, stable=True)
    return fetch(own), fetch(values[:, :most]), fetch(names[:, :most])
