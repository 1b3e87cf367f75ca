"""Models that do something with a step's lease before they run it."""

from __future__ import annotations

import time
from typing import final

from kvlease.kernels.models.deepseek_v4 import DeepseekV4
from kvlease.kernels.models.opening import open_layer_of
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import StepInput, StepResult, Stream
from kvlease.protocols.schema import Schema


class WaitsForAll:
    """A model behind the gate that most engines have: no layer begins before the last has come.

    Implements `ModelRunner`.
    """

    def __init__(self, inner: DeepseekV4) -> None:
        """Borrow the model."""
        self._inner = inner

    @property
    def schema(self) -> Schema:
        """The model's."""
        return self._inner.schema

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return self._inner.vocab_size

    @property
    def max_positions(self) -> int:
        """The model's."""
        return self._inner.max_positions

    @property
    def eos_tokens(self) -> frozenset[int]:
        """The model's."""
        return self._inner.eos_tokens

    @property
    def fingerprint(self) -> str:
        """The model's."""
        return self._inner.fingerprint

    async def forward(self, inputs: StepInput, lease: StepLease, stream: Stream) -> StepResult:
        """Order the step behind every layer, then run it."""
        await self._resolve_all(lease, stream)
        return await self._inner.forward(inputs, lease, stream)

    async def _resolve_all(self, lease: StepLease, stream: Stream) -> None:
        for layer in self._inner.schema.layers:
            await open_layer_of(lease, layer, stream)


@final
class TimesTheGate(WaitsForAll):
    """A model that measures what resolving every layer costs the host, step by step."""

    def __init__(self, inner: DeepseekV4) -> None:
        """Borrow the model."""
        super().__init__(inner)
        self.seconds: list[float] = []

    async def _resolve_all(self, lease: StepLease, stream: Stream) -> None:
        began = time.perf_counter()
        await super()._resolve_all(lease, stream)
        self.seconds.append(time.perf_counter() - began)
