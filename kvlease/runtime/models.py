"""Which model an engine runs.

Keeps torch-heavy loading off the Trio thread; knows the config, not the engine.
"""

from pathlib import Path

from attrs import frozen

from kvlease.kernels.models.deepseek_v4 import ModelOptions, load_model
from kvlease.kernels.models.null_model import NullModel
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.ports import ModelRunner
from kvlease.runtime.cuda_streams import require_cuda

EMBEDDED_PAGE_TOKENS = 64
PAGE_TOKENS = 256


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
