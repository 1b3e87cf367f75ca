"""A model's weights as the forward wants them: products with a common input joined into one.

Takes tensors by canonical name from any source; knows no file.
"""

from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from kvlease.kernels.mhc import MixerWeights
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.moe import DENSE_EXPERTS, ExpertWeights
from kvlease.kernels.norms import accumulate_dtype
from kvlease.kernels.placing import CPU


class TensorSource(Protocol):
    """Where tensors come from, by canonical name."""

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, of its full shape, in any dtype."""
        ...


@frozen
class CompressorWeights:
    """Position bias [ratio, width] and norm [row width], in the accumulating dtype."""

    bias: Tensor
    norm: Tensor


@frozen
class AttentionWeights:
    """One layer's attention.

    ``from_hidden`` [sum of its parts, hidden] joins every projection of the block's input, in the
    order of ``hidden_parts`` (widths): query rank, window row, compressor kv and gate, index
    compressor kv and gate, index head weights. ``from_query`` joins the projections of the query's
    low-rank vector: heads, then index heads.
    """

    from_hidden: Tensor
    hidden_parts: tuple[int, ...]
    q_norm: Tensor
    kv_norm: Tensor
    from_query: Tensor
    sinks: Tensor
    out_down: Tensor
    out_up: Tensor
    compressor: CompressorWeights | None
    index_compressor: CompressorWeights | None


@frozen
class MoeWeights:
    """One layer's experts and router; ``shared`` is None where it is the last of ``experts``."""

    router: Tensor
    bias: Tensor | None
    table: Tensor | None
    experts: ExpertWeights
    shared: ExpertWeights | None


@frozen
class LayerWeights:
    """One layer."""

    attn_mixer: MixerWeights
    attn_norm: Tensor
    attention: AttentionWeights
    ffn_mixer: MixerWeights
    ffn_norm: Tensor
    moe: MoeWeights


@frozen
class ModelWeights:
    """All weights; matrices in the compute dtype, norms, mixers and biases accumulating."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    head_mixer: MixerWeights
    norm: Tensor
    head: Tensor


def build_weights(
    config: V4Config, source: TensorSource, dtype: torch.dtype, device: torch.device = CPU
) -> ModelWeights:
    """Return the weights of a model, converted and joined, on the device.

    Ownership: takes tensors one at a time from the source and keeps its own copies.
    """
    builder = _Builder(config, source, dtype, device)
    embed = builder.matrix("embed.weight")
    return ModelWeights(
        embed=embed,
        layers=tuple(builder.layer(number) for number in range(len(config.layer_kinds))),
        head_mixer=builder.mixer("hc_head", (config.streams,)),
        norm=builder.vector("norm.weight"),
        head=embed if config.tied_head else builder.matrix("head.weight"),
    )


class _Builder:
    def __init__(
        self, config: V4Config, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._source = source
        self._device = device
        self._dtype = dtype
        self._wide = accumulate_dtype(dtype)

    def matrix(self, *names: str) -> Tensor:
        # a fresh allocation, aligned like every other
        return torch.cat([self._get(name, self._dtype) for name in names]).clone()

    def vector(self, name: str) -> Tensor:
        return self._get(name, self._wide).clone()

    def _get(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._source.tensor(name).to(device=self._device, dtype=dtype)

    def mixer(self, prefix: str, spread: tuple[int, ...]) -> MixerWeights:
        counts = torch.tensor(spread, device=self._device)
        projection, scale, base = (
            self.vector(f"{prefix}_{part}") for part in ("fn", "scale", "base")
        )
        return MixerWeights(projection, scale.repeat_interleave(counts), base)

    def layer(self, number: int) -> LayerWeights:
        prefix = f"layers.{number}"
        size = self._config.streams
        spread = (size, size, size * size)
        return LayerWeights(
            attn_mixer=self.mixer(f"{prefix}.hc_attn", spread),
            attn_norm=self.vector(f"{prefix}.attn_norm.weight"),
            attention=self._attention(number, f"{prefix}.attn"),
            ffn_mixer=self.mixer(f"{prefix}.hc_ffn", spread),
            ffn_norm=self.vector(f"{prefix}.ffn_norm.weight"),
            moe=self._moe(number, f"{prefix}.ffn"),
        )

    def _attention(self, number: int, prefix: str) -> AttentionWeights:
        config = self._config
        kind = config.layer_kinds[number]
        hidden = [f"{prefix}.wq_a.weight", f"{prefix}.wkv.weight"]
        widths = [config.q_rank, config.head_dim]
        query = [f"{prefix}.wq_b.weight"]
        if kind != "sliding":
            hidden += [f"{prefix}.compressor.{part}.weight" for part in ("wkv", "wgate")]
            widths += [config.head_dim * (2 if kind == "sparse" else 1)] * 2
        if kind == "sparse":
            inner = f"{prefix}.indexer.compressor"
            hidden += [f"{inner}.{part}.weight" for part in ("wkv", "wgate")]
            hidden.append(f"{prefix}.indexer.weights_proj.weight")
            widths += [2 * config.index_dim, 2 * config.index_dim, config.index_heads]
            query.append(f"{prefix}.indexer.wq_b.weight")
        per_group = config.num_heads * config.head_dim // config.o_groups
        return AttentionWeights(
            from_hidden=self.matrix(*hidden),
            hidden_parts=tuple(widths),
            q_norm=self.vector(f"{prefix}.q_norm.weight"),
            kv_norm=self.vector(f"{prefix}.kv_norm.weight"),
            from_query=self.matrix(*query),
            sinks=self.vector(f"{prefix}.attn_sink"),
            out_down=self.matrix(f"{prefix}.wo_a.weight").view(config.o_groups, -1, per_group),
            out_up=self.matrix(f"{prefix}.wo_b.weight"),
            compressor=None if kind == "sliding" else self._compressor(f"{prefix}.compressor"),
            index_compressor=(
                self._compressor(f"{prefix}.indexer.compressor") if kind == "sparse" else None
            ),
        )

    def _compressor(self, prefix: str) -> CompressorWeights:
        return CompressorWeights(
            bias=self.vector(f"{prefix}.ape"), norm=self.vector(f"{prefix}.norm.weight")
        )

    def _moe(self, number: int, prefix: str) -> MoeWeights:
        config = self._config
        is_hash = config.mlp_kinds[number] == "hash"
        routed = [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)]
        shared = f"{prefix}.shared_experts"
        # one list of experts is one product of groups on a device
        joined = config.num_experts + 1 <= DENSE_EXPERTS or self._device.type != "cpu"
        return MoeWeights(
            router=self.vector(f"{prefix}.gate.weight"),
            bias=None if is_hash else self.vector(f"{prefix}.gate.bias"),
            table=self._get(f"{prefix}.gate.tid2eid", torch.int64).clone() if is_hash else None,
            experts=self._experts([*routed, shared] if joined else routed),
            shared=None if joined else self._experts([shared]),
        )

    def _experts(self, prefixes: list[str]) -> ExpertWeights:
        down = [self._get(f"{p}.w2.weight", self._dtype) for p in prefixes]
        return ExpertWeights(
            gate=self.matrix(*(f"{p}.w1.weight" for p in prefixes)),
            up=self.matrix(*(f"{p}.w3.weight" for p in prefixes)),
            down=torch.cat(down, dim=1).clone(),
            num_experts=len(prefixes),
        )
