"""Models that do something with a step's lease before they run it."""

from __future__ import annotations

import time
from typing import final

from kvlease.kernels.models.deepseek_v4 import DeepseekV4
from kvlease.kernels.models.opening import open_layer_of, open_ready_step, stand_for_all
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
        for layer in self._inner.schema.layers:
            await open_layer_of(lease, layer, stream)
        return await self._inner.forward(inputs, lease, stream)


@final
class TimesTheGate(WaitsForAll):
    """A model that measures what opening a ready decode step costs the host, step by step.

    Its graphs must know the pool's memory: the step is opened as the model itself opens it then.
    """

    def __init__(self, inner: DeepseekV4) -> None:
        """Borrow the model."""
        super().__init__(inner)
        self._few = stand_for_all(inner.schema.layers)
        self.seconds: list[float] = []

    async def forward(self, inputs: StepInput, lease: StepLease, stream: Stream) -> StepResult:
        """Time the opening of a decode step, then run any step."""
        if lease.was_ready and all(len(part.tokens) == 1 for part in inputs.sequences):
            began = time.perf_counter()
            open_ready_step(lease, self._few)
            self.seconds.append(time.perf_counter() - began)
        return await self._inner.forward(inputs, lease, stream)
