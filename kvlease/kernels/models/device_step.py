"""The layers of a step by kernels, whoever launches them: one after another, or into a graph.

A block's output is not added to the streams where it ends but where the next block begins, in the
launch that also multiplies the streams with that block's mixer.
"""

from attrs import frozen
from torch import Tensor

from kvlease.kernels.gpu.greedy import Following, greedy_tokens
from kvlease.kernels.gpu.products import multiply
from kvlease.kernels.gpu.step_rows import StepRows
from kvlease.kernels.gpu.streams import (
    BlockOutput,
    PackedMixer,
    enter_streams,
    leave_streams,
    spread_tokens,
)
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.device_attention import ChunkWindows, LayerStep, attend
from kvlease.kernels.models.device_experts import mix
from kvlease.kernels.models.device_rows import LayerMemory
from kvlease.kernels.models.device_weights import DeviceWeights
from kvlease.protocols.schema import AnyLayer, SlidingLayer


@frozen
class Pending:
    """Streams [N, S, D] bf16 and the output of the block that read them, not yet added."""

    streams: Tensor
    output: BlockOutput
    mixing: Tensor

    def rows(self, numbers: Tensor) -> "Pending":
        """Return the same of some rows only."""
        return Pending(
            self.streams.index_select(0, numbers),
            BlockOutput(self.output.values.index_select(1, numbers)),
            self.mixing.index_select(0, numbers),
        )


@frozen
class DeviceLayers:
    """A model's configuration and packed weights, and what a step does with them."""

    config: V4Config
    packed: DeviceWeights

    def _enter(
        self, before: Pending | Tensor, mixer: PackedMixer, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the streams, the next block's normalised input, and its mixing."""
        if isinstance(before, Pending):
            mixed = leave_streams(before.streams, before.output, before.mixing, mixer)
        else:
            embed = self.packed.weights.embed
            mixed = spread_tokens(embed, before, self.config.streams, mixer)
        return mixed.streams, *enter_streams(mixed, mixer, weight, self.config.mixer)

    def layer(
        self,
        before: Pending | Tensor,
        tokens: Tensor,
        layer: AnyLayer,
        memory: LayerMemory,
        rows: StepRows,
        windows: ChunkWindows | None,
    ) -> Pending:
        """Run one layer; return what is pending.

        ``before`` is what the layer before left, or the tokens [N] int32 for the first one.
        Ownership: borrows the memory, as `attend` does.
        """
        packed = self.packed.layers[layer.id]
        weights = packed.weights
        is_main = isinstance(layer, SlidingLayer)
        turns = self.packed.main_turns if is_main else self.packed.compress_turns
        streams, hidden, mixing = self._enter(before, packed.attn_mixer, weights.attn_norm)
        step = LayerStep(layer, weights.attention, memory, turns, self.config)
        between = Pending(streams, attend(hidden, step, rows, windows), mixing)
        streams, hidden, mixing = self._enter(between, packed.ffn_mixer, weights.ffn_norm)
        return Pending(streams, mix(hidden, tokens, packed, self.config), mixing)

    def finish(self, last: Pending, following: Following | None) -> tuple[Tensor, Tensor]:
        """Return logits [N, V] float32 and each row's best token [N] int32.

        ``following`` are a decode step's numbers, if they are to become the next one's.
        """
        weights = self.packed.weights
        _, hidden, _ = self._enter(last, self.packed.head_mixer, weights.norm)
        parts = multiply(hidden, weights.head)
        logits = parts[0].float() if len(parts) == 1 else parts.sum(0)
        return logits, greedy_tokens(logits, following)
