"""DeepSeek-V4 as a `ModelRunner`: one launch to begin, one a layer, one to finish.

Awaits leases without knowing which event loop runs them, and never holds a row itself.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import final

import torch
from attrs import frozen

from kvlease.errors import UsageError
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.config_file import read_config
from kvlease.kernels.models.embedded import EMBEDDED_CONFIG, RandomTensors
from kvlease.kernels.models.loader import Checkpoint
from kvlease.kernels.models.opening import (
    StepView,
    open_layer_of,
    open_ready_step,
    stand_for_all,
)
from kvlease.kernels.models.step_run import CompiledRuns, Run, StepRun, TokensDrawn, WholeRun
from kvlease.kernels.models.weights import ModelWeights, build_weights
from kvlease.kernels.selftest import require_row_invariance
from kvlease.kernels.tiling import EXACT, FAST, Tiling
from kvlease.protocols.config import Device
from kvlease.protocols.geometries import ComputeDtype, StoreFormat, deepseek_v4_schema
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import StepInput, Stream
from kvlease.protocols.schema import AnyLayer, Schema

_DTYPES: dict[ComputeDtype, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


@frozen
class ModelOptions:
    """How to run a model: dtype, cached row formats, page size in tokens, exactness, device."""

    dtype: ComputeDtype = "float32"
    kv_format: StoreFormat = "same"
    index_k_format: StoreFormat = "same"
    page_tokens: int = 256
    exact: bool = True
    device: Device = "cpu"


@final
class DeepseekV4:
    """A `ModelRunner`. Holds weights; cached state is reached through the leases of each step."""

    def __init__(
        self, config: V4Config, weights: ModelWeights, fingerprint: str, options: ModelOptions
    ) -> None:
        """Take the weights. Raises ConfigError when the page size or the dtype cannot work."""
        self.config = config
        self.tiling: Tiling = EXACT if options.exact else FAST
        self.device = options.device
        self._dtype = _DTYPES[options.dtype]
        self._fingerprint = fingerprint
        self._schema = deepseek_v4_schema(
            config.geometry,
            options.page_tokens,
            options.dtype,
            options.kv_format,
            options.index_k_format,
        )
        self._few = stand_for_all(self._schema.layers)
        self._run = _runs(config, weights, self.tiling, options)
        if options.exact:
            width = config.hidden * config.streams
            require_row_invariance(self._dtype, weights.embed.device, width)

    @property
    def schema(self) -> Schema:
        """The cached state this model keeps."""
        return self._schema

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """The longest sequence, prompt and answer together, in tokens."""
        return self.config.max_positions

    @property
    def eos_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.config.eos_tokens

    @property
    def fingerprint(self) -> str:
        """Hash of weights and geometry."""
        return self._fingerprint

    def compile_ahead(self, sessions: int, pages: int, told: Callable[[int, int], None]) -> int:
        """Do as `CompilesAhead` says; plain torch has nothing to compile."""
        if not isinstance(self._run, CompiledRuns):
            return 0
        longest = -(-self.max_positions // self._schema.page_tokens)
        return self._run.compile_ahead(self._schema, sessions, min(pages, longest), told)

    async def forward(self, inputs: StepInput, lease: StepLease, stream: Stream) -> TokensDrawn:
        """Launch one step on the stream, awaiting one layer's lease at a time.

        Ownership: borrows the lease and the inputs until the stream's work is done; rows are
        written only through the lease.
        Checkpoints: only where a layer's lease waits. Cancelled: what was launched still runs.

        Raises:
            TransferFailed: a layer's transfer failed; discard the step.
            UsageError: a step without sequences, or a sequence without tokens.
        """
        if not inputs.sequences or not all(len(part.tokens) for part in inputs.sequences):
            raise UsageError("a step needs at least one sequence, and each at least one token")
        run = self._run(inputs)
        layers = self._schema.layers
        is_ready = lease.ready_through_layer >= len(layers)
        if is_ready and isinstance(run, WholeRun) and run.fits_a_graph:
            opened = self._few if run.knows(lease.memory) else layers
            views = open_ready_step(lease, opened)
            stream.launch(partial(run.whole, views, lease.memory))
            return run.result
        resolved: list[tuple[AnyLayer, StepView]] = []
        stream.launch(run.begin)
        for layer in layers:
            view = await open_layer_of(lease, layer, stream)
            resolved.append((layer, view))
            stream.launch(partial(run.layer, layer, view))
        stream.launch(run.finish)
        for _ in range(1, run.rounds):
            stream.launch(run.begin)
            for layer, view in resolved:
                stream.launch(partial(run.layer, layer, view))
            stream.launch(run.finish)
        return run.result


def _runs(
    config: V4Config, weights: ModelWeights, tiling: Tiling, options: ModelOptions
) -> Callable[[StepInput], Run]:
    """Return what begins a step: by kernels where they can run the model, else by plain torch."""
    dtype = _DTYPES[options.dtype]
    if options.device == "cuda" and not options.exact:
        # only here: a machine without a CUDA device need not have triton
        from kvlease.kernels.models.device_run import kernel_runs

        found = kernel_runs(config, weights, dtype)
        if found is not None:
            return found
    return partial(StepRun, config, weights, dtype, tiling)


def load_model(folder: Path | None, options: ModelOptions, seed: int = 0) -> DeepseekV4:
    """Return the model of a checkpoint folder, or the embedded one where ``folder`` is None.

    ``seed`` chooses the embedded model's weights.

    Raises:
        ModelLoadError: the checkpoint cannot be used; the sentence names file and key or tensor.
        ConfigError: the page size does not fit, or exactness cannot be had on this machine.
    """
    dtype, device = _DTYPES[options.dtype], torch.device(options.device)
    if folder is None:
        source = RandomTensors(EMBEDDED_CONFIG, seed)
        weights = build_weights(EMBEDDED_CONFIG, source, dtype, device)
        return DeepseekV4(EMBEDDED_CONFIG, weights, source.fingerprint(), options)
    config = read_config(folder)
    with Checkpoint(folder, config) as checkpoint:
        weights = build_weights(config, checkpoint, dtype, device)
        return DeepseekV4(config, weights, checkpoint.fingerprint(), options)
