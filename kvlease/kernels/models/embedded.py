"""The embedded model: every part of DeepSeek-V4 at a size that runs anywhere, with no files.

Its weights are random but fixed by a seed; nothing is left at zero, so that every table, bias and
sink has a visible effect and a cache error cannot hide.
"""

import hashlib

import torch
from torch import Tensor

from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.tensor_names import layer_shapes, model_shapes
from kvlease.kernels.models.tokenizer import EOS, VOCAB_SIZE

EMBEDDED_CONFIG = V4Config(
    vocab_size=VOCAB_SIZE,
    hidden=128,
    layer_kinds=("sliding", "sparse", "heavy", "sparse"),
    mlp_kinds=("hash", "score", "score", "score"),
    num_heads=4,
    head_dim=64,
    rope_dim=16,
    q_rank=64,
    o_groups=2,
    o_rank=32,
    window=64,
    index_heads=16,
    index_dim=32,
    index_topk=32,
    num_experts=8,
    experts_per_token=2,
    expert_width=64,
    max_positions=32768,
    sparse_ratio=4,
    heavy_ratio=32,
    eos_tokens=frozenset({EOS}),
)
"""Geometry of the embedded model."""


class RandomTensors:
    """A `TensorSource` of reproducible random weights for any configuration.

    They are drawn on ``device``, so that a model of many gigabytes takes seconds; another kind of
    device draws other numbers.
    """

    def __init__(self, config: V4Config, seed: int = 0, device: str = "cpu") -> None:
        """Nothing is made before it is asked for."""
        self._config = config
        self._seed = seed
        self._device = device
        self._shapes = dict(model_shapes(config))
        for number in range(len(config.layer_kinds)):
            self._shapes.update(
                (f"layers.{number}.{name}", shape)
                for name, shape in layer_shapes(config, number).items()
            )

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._shapes)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in float32 (a routing table in int64), the same on every call."""
        shape = self._shapes[name]
        key = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        draw = torch.Generator(self._device).manual_seed(int.from_bytes(key, "little"))
        if name.endswith(".tid2eid"):
            size = shape[0], self._config.num_experts
            order = torch.rand(size, generator=draw, device=self._device)
            return order.argsort(dim=1)[:, : shape[1]].contiguous()
        values = torch.randn(shape, generator=draw, device=self._device)
        if name.endswith("norm.weight"):
            return values.mul_(0.1).add_(1.0)
        if name == "embed.weight":
            return values
        is_bias = len(shape) == 1 or name.endswith(".ape")
        return values.mul_(0.5 if is_bias else shape[-1] ** -0.5)

    def fingerprint(self) -> str:
        """Return a hash of geometry and seed."""
        about = f"{self._config!r} random {self._seed} {self._device}".removesuffix(" cpu")
        return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
