"""One step on a stream: the state that travels from launch to launch, and the result it leaves.

Every method runs on the stream's worker, in order; none knows how the leases were resolved.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor

from kvlease.errors import UsageError
from kvlease.kernels.linear import linear
from kvlease.kernels.mhc import enter_block, leave_block, read_head
from kvlease.kernels.models.attention_block import attend
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.moe_block import mix
from kvlease.kernels.models.opening import StepView
from kvlease.kernels.models.step_context import AttentionContext, StepRotations
from kvlease.kernels.models.weights import ModelWeights
from kvlease.kernels.norms import accumulate_dtype, rms_norm
from kvlease.kernels.placing import place
from kvlease.kernels.sampling import sample_tokens
from kvlease.kernels.sampling_device import PendingDraw
from kvlease.kernels.step_plan import StepPlan
from kvlease.kernels.tiling import Tiling, pad_rows
from kvlease.protocols.ports import SampledToken, Sampling, StepInput
from kvlease.protocols.schema import AnyLayer, Schema

Collect = Callable[[], list[SampledToken]]
"""Reads tokens that were drawn, once the stream's work is done."""


@final
class TokensDrawn:
    """A `StepResult`: what the step drew, once the stream's work is done."""

    __slots__ = ("_asked", "_rounds", "_tokens", "logits")

    def __init__(self) -> None:
        """Empty until the step's last launch has run."""
        self._rounds: Sequence[Collect] = ()
        self._asked: Sequence[bool] = ()
        self._tokens: list[list[SampledToken]] | None = None
        self.logits: Tensor | None = None

    def fill(
        self,
        rounds: Sequence[Collect],
        asked: Sequence[bool],
        logits: Tensor | None,
    ) -> None:
        """Leave the result; called once, on the stream's worker.

        Each of ``rounds``, at least one, returns a token of every sequence that asked, in order.
        ``logits`` are the last round's.
        """
        self._rounds, self._asked, self.logits = rounds, asked, logits

    def tokens(self) -> Sequence[Sequence[SampledToken]]:
        """Return per sequence the tokens drawn.

        Raises:
            UsageError: the step's work has not ended; wait for its completion first.
        """
        if self._tokens is None:
            if not self._rounds:
                raise UsageError("the step is still running; wait for its completion first")
            drawn = zip(*(collect() for collect in self._rounds), strict=True)
            self._tokens = [list(next(drawn)) if asked else [] for asked in self._asked]
        return self._tokens


class Run(Protocol):
    """A step on a stream: one launch to begin, one a layer, one to finish."""

    @property
    def rounds(self) -> int:
        """How often to make all launches: each round goes on from the tokens of the one before."""
        ...

    @property
    def result(self) -> TokensDrawn:
        """What the step draws; filled by its last launch."""
        ...

    def begin(self) -> None:
        """Lay out the step's rows."""
        ...

    def layer(self, layer: AnyLayer, view: StepView) -> None:
        """Run one layer over its resolved view."""
        ...

    def finish(self) -> None:
        """Draw tokens; in the last round leave the result."""
        ...


@runtime_checkable
class WholeRun(Protocol):
    """A run that can take a step as one launch, once all of its layers are resolved."""

    @property
    def fits_a_graph(self) -> bool:
        """Whether this step is one that does."""
        ...

    def knows(self, memory: object) -> bool:
        """Whether a step over this memory was taken before, so that few layers need be opened."""
        ...

    def whole(self, layers: Sequence[tuple[AnyLayer, StepView]], memory: object) -> None:
        """Do the work of all other launches.

        ``layers`` are all layers, or where the memory is known, those that stand for all.
        """
        ...


@runtime_checkable
class CompiledRuns(Protocol):
    """Begins steps whose kernels are compiled, when they are first launched or before that."""

    def __call__(self, inputs: StepInput) -> Run:
        """Begin a step."""
        ...

    def compile_ahead(
        self, schema: Schema, sessions: int, pages: int, told: Callable[[int, int], None]
    ) -> int:
        """Do as `CompilesAhead` says, over memory of this schema."""
        ...


def _launch_draw(
    logits: Tensor, how: Sequence[Sampling], places: Sequence[int], *, digests: bool
) -> Collect:
    """Draw at once on the CPU, in the stream's order on a device; return how to read the tokens."""
    if logits.device.type == "cpu":
        drawn = sample_tokens(logits, how, places, digests=digests)
        return lambda: drawn
    return PendingDraw(logits, how, places, digests=digests).collect


@final
class StepRun:
    """The hidden state of one step and how each launch advances it."""

    def __init__(
        self,
        config: V4Config,
        weights: ModelWeights,
        dtype: torch.dtype,
        tiling: Tiling,
        inputs: StepInput,
    ) -> None:
        """Borrows weights and inputs until the step's last launch has run."""
        self._config = config
        self._weights = weights
        self._dtype = dtype
        self._tiling = tiling
        self._inputs = inputs
        self._context: AttentionContext | None = None
        self._streams: Tensor | None = None
        self._drawn: list[Collect] = []
        # on a device nobody would know the tokens in time
        ahead = min(part.may_produce for part in inputs.sequences)
        self.rounds = ahead if weights.embed.device.type == "cpu" else 1
        self.result = TokensDrawn()

    @torch.inference_mode()
    def begin(self) -> None:
        """Lay out the rows and embed their tokens into all residual streams."""
        sequences = self._inputs.sequences
        plan = StepPlan(
            [part.start for part in sequences],
            [part.tokens for part in sequences],
            self._tiling,
            self._weights.embed.device,
        )
        rotations = StepRotations(self._config, plan, accumulate_dtype(self._dtype))
        self._context = AttentionContext(self._config, plan, rotations, self._dtype)
        embedded = self._weights.embed.index_select(0, plan.tokens)
        self._streams = embedded.unsqueeze(1).repeat(1, self._config.streams, 1)

    @torch.inference_mode()
    def layer(self, layer: AnyLayer, view: StepView) -> None:
        """Run one layer: attention, then experts, each between entering and leaving the streams."""
        ctx, streams = self._state()
        config, weights, tiling = self._config, self._weights.layers[layer.id], self._tiling
        entered, mixing = enter_block(streams, weights.attn_mixer, config.mixer, tiling)
        hidden = rms_norm(entered, weights.attn_norm, config.norm_eps)
        output = attend(hidden, weights.attention, layer, view, ctx)
        streams = leave_block(streams, output, mixing, tiling)
        entered, mixing = enter_block(streams, weights.ffn_mixer, config.mixer, tiling)
        hidden = rms_norm(entered, weights.ffn_norm, config.norm_eps)
        output = mix(hidden, ctx.plan.tokens, weights.moe, config, tiling)
        self._streams = leave_block(streams, output, mixing, tiling)

    @torch.inference_mode()
    def finish(self) -> None:
        """Compute logits of the rows asked for, draw tokens, and drop the hidden state."""
        ctx, streams = self._state()
        sequences = self._inputs.sequences
        asked = [part.sample is not None for part in sequences]
        collect: Collect = list[SampledToken]
        logits: Tensor | None = None
        if any(asked):
            rows = place(torch.from_numpy(ctx.plan.last_rows[asked]), ctx.plan.device)
            logits = self._logits(streams.index_select(0, rows))
            how = [s for part in sequences if (s := part.sample) is not None]
            places = [part.start + len(part.tokens) for part in compress(sequences, asked)]
            collect = _launch_draw(logits, how, places, digests=self._inputs.digests)
        self._streams = self._context = None
        self._drawn.append(collect)
        if len(self._drawn) == self.rounds:
            self.result.fill(self._drawn, asked, logits)
        else:
            self._inputs = self._inputs.following(one.token for one in collect())

    def _logits(self, streams: Tensor) -> Tensor:
        """Return logits [S, V] of streams [S, streams, hidden], in the accumulating dtype."""
        config, weights, tiling = self._config, self._weights, self._tiling
        count = len(streams)
        padded = pad_rows(streams, tiling.round_rows(count))
        read = read_head(padded, weights.head_mixer, config.mixer, tiling)
        hidden = rms_norm(read, weights.norm, config.norm_eps)
        logits = linear(hidden, weights.head, tiling)[:count]
        return logits.to(accumulate_dtype(self._dtype)).contiguous()

    def _state(self) -> tuple[AttentionContext, Tensor]:
        if self._context is None or self._streams is None:
            raise UsageError("the step's launches ran out of order: begin() comes first")
        return self._context, self._streams
