"""The numbers of a DeepSeek-V4 model, and nothing about where they were written."""

from typing import Literal

from attrs import frozen

from kvlease.kernels.mhc import MixerNumbers
from kvlease.kernels.rope import RopeSpec, Yarn
from kvlease.kernels.routing import Scoring
from kvlease.protocols.geometries import LayerKind, V4Geometry

MlpKind = Literal["hash", "score"]


@frozen
class V4Config:
    """Geometry and constants of one model.

    Counts are of heads, experts, streams; widths in channels; ratios in tokens per row; ``window``
    and ``max_positions`` in tokens.
    """

    vocab_size: int
    hidden: int
    layer_kinds: tuple[LayerKind, ...]
    mlp_kinds: tuple[MlpKind, ...]
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    max_positions: int
    sparse_ratio: int = 4
    heavy_ratio: int = 128
    streams: int = 4
    sinkhorn_iterations: int = 20
    mixer_eps: float = 1e-6
    norm_eps: float = 1e-6
    scoring: Scoring = "sqrtsoftplus"
    routed_scale: float = 1.5
    swiglu_limit: float = 10.0
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: Yarn | None = None
    eos_tokens: frozenset[int] = frozenset()
    tied_head: bool = False

    @property
    def geometry(self) -> V4Geometry:
        """The part that decides the cached state."""
        return V4Geometry(
            layer_kinds=self.layer_kinds,
            head_dim=self.head_dim,
            rope_dim=self.rope_dim,
            index_head_dim=self.index_dim,
            window=self.window,
            sparse_ratio=self.sparse_ratio,
            heavy_ratio=self.heavy_ratio,
        )

    @property
    def mixer(self) -> MixerNumbers:
        """Constants of the residual streams."""
        return MixerNumbers(self.streams, self.sinkhorn_iterations, self.mixer_eps, self.norm_eps)

    @property
    def main_rope(self) -> RopeSpec:
        """Rotation of sliding layers."""
        return RopeSpec(self.rope_dim, self.rope_theta)

    @property
    def compress_rope(self) -> RopeSpec:
        """Rotation of compressed layers: queries, window, compressed rows and indexer."""
        return RopeSpec(self.rope_dim, self.compress_rope_theta, self.yarn)
