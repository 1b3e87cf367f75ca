"""Other people's kernels, if this machine has them: found in installed packages, never shipped.

A peer is looked for without importing the package that carries it, whose own imports may need a
whole serving stack. This module compares nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

import torch


class FlashMLA(Protocol):
    """FlashMLA's sparse decode and prefill, as vllm's package carries them (operators of torch)."""

    def sparse_decode_fwd(self, *arguments: object) -> tuple[torch.Tensor, ...]:
        """Attend one query token a sequence over selected fp8 rows."""
        ...

    def sparse_prefill_fwd(self, *arguments: object) -> tuple[torch.Tensor, ...]:
        """Attend many query tokens over selected bf16 rows."""
        ...


class DeepGEMM(Protocol):
    """DeepGEMM's indexer logits (fp8 queries and keys)."""

    def get_paged_mqa_logits_metadata(self, *arguments: object) -> torch.Tensor:
        """Plan one step's work."""
        ...

    def fp8_paged_mqa_logits(self, *arguments: object) -> torch.Tensor:
        """Score every cached key of every sequence."""
        ...

    def fp8_mqa_logits(self, *arguments: object, **options: object) -> torch.Tensor:
        """Score a chunk's queries against one sequence's keys."""
        ...


def _package(name: str) -> Path | None:
    """Return the folder of an installed package, importing nothing."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def flash_mla() -> FlashMLA | str:
    """Return FlashMLA, or one sentence that says why it is not there."""
    folder = _package("vllm")
    library = None if folder is None else folder / "_flashmla_C.abi3.so"
    if library is None or not library.is_file():
        return "FlashMLA is not here (vllm's package carries it)"
    try:
        cast("Callable[[str], None]", torch.ops.load_library)(str(library))
    except OSError as error:
        return f"FlashMLA does not load with torch {torch.__version__}: {error}"
    return cast("FlashMLA", torch.ops._flashmla_C)


def deep_gemm() -> DeepGEMM | str:
    """Return DeepGEMM, or one sentence that says why it is not there."""
    folder = _package("vllm")
    own = None if folder is None else folder / "third_party" / "deep_gemm"
    try:
        if own is not None and own.is_dir():
            return cast("DeepGEMM", _load_as("deep_gemm", own))
        if _package("deep_gemm") is not None:
            return cast("DeepGEMM", importlib.import_module("deep_gemm"))
    except Exception as error:  # a foreign package may fail in any way: that is a finding
        return f"DeepGEMM does not load with torch {torch.__version__}: {error}"
    return "DeepGEMM is not here (its own package or vllm's carries it)"


def _load_as(name: str, folder: Path) -> ModuleType:
    """Import a package from a folder under a name of its own."""
    if name in sys.modules:
        return sys.modules[name]
    where = [str(folder)]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=where
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
