"""Which model an engine runs.

Keeps torch-heavy loading off the Trio thread; knows the config, not the engine.
"""

import logging
import time
from pathlib import Path

import trio
from attrs import frozen

from kvlease.kernels.models.deepseek_v4 import ModelOptions, load_model
from kvlease.kernels.models.null_model import NullModel
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.ports import CompilesAhead, ModelRunner
from kvlease.runtime.cuda_streams import require_cuda

EMBEDDED_PAGE_TOKENS = 64
PAGE_TOKENS = 256
TELL_EVERY_S = 5.0
"""Seconds between two words on how far compilation is."""

_log = logging.getLogger(__name__)


@frozen
class LoadedModel:
    """A model ready to run, and what to call it in logs and reports."""

    runner: ModelRunner
    name: str


def load(model: str | Path | ModelRunner | None, config: EngineConfig) -> LoadedModel:
    """Load a checkpoint folder, or the embedded model (None), or no arithmetic at all.

    A runner is taken as it is: its page size and dtypes are its own. Raises ModelLoadError or
    ConfigError in one sentence.
    """
    require_cuda(config)
    if not (model is None or isinstance(model, str | Path)):
        return LoadedModel(model, type(model).__name__)
    if config.compute == "none":
        return LoadedModel(NullModel(config.page_tokens or PAGE_TOKENS), "null")
    default = EMBEDDED_PAGE_TOKENS if model is None else PAGE_TOKENS
    options = ModelOptions(
        dtype=config.dtype,
        kv_format=config.kv_format,
        index_k_format=config.index_k_format,
        page_tokens=config.page_tokens or default,
        exact=config.exact,
        device=config.device,
    )
    folder = None if model is None else Path(model)
    runner = load_model(folder, options, config.seed)
    return LoadedModel(runner, "embedded" if folder is None else folder.name)


def compile_kernels(runner: CompilesAhead, config: EngineConfig) -> None:
    """Compile a model's kernels before the first request; for a thread that `trio` has started.

    Takes a fraction of a second where the machine has compiled them before. Cancelled: ends after
    the kernels that are being compiled.
    """
    next_word = time.monotonic() + TELL_EVERY_S

    def told(done: int, total: int) -> None:
        nonlocal next_word
        trio.from_thread.check_cancelled()
        if time.monotonic() >= next_word:
            next_word += TELL_EVERY_S
            _log.warning("compiling the model's kernels: %d of %d done", done, total)

    runner.compile_ahead(config.max_sessions, config.device_pages, told)
