"""Reading a checkpoint folder: safetensors, one file or sharded, in any accepted spelling.

Everything is checked before the first weight is used; each refusal names the file and the tensor.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol, Self, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlease.errors import ModelLoadError
from kvlease.kernels.models.config import V4Config
from kvlease.kernels.models.quantized import (
    FP4_DTYPES,
    FP8_DTYPES,
    SCALE_DTYPES,
    dequantized,
    scale_name,
    scales_shape,
    stored_shape,
)
from kvlease.kernels.models.tensor_names import (
    FUSED_DOWN,
    FUSED_UP,
    Shapes,
    canonical_name,
    is_ignored,
    layer_shapes,
    model_shapes,
)

_FLOATS = frozenset(("F64", "F32", "BF16", "F16"))
_INTEGERS = frozenset(("I64", "I32"))
_HASHED_WHOLE_NBYTES = 1 << 20
_SAMPLE_NBYTES = 1 << 16


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, place: int) -> Tensor: ...


class _File(Protocol):
    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...
    def get_slice(self, name: str) -> _Slice: ...


class _OpenFile(Protocol):
    def __call__(self, path: Path, *, framework: str) -> AbstractContextManager[_File]: ...


class Checkpoint:
    """An open checkpoint; a `TensorSource` for ``build_weights``. Close it by its ``with`` block.

    Raises (on opening):
        ModelLoadError: no weights, a damaged or missing shard, a missing or misshapen tensor, or
            one stored in a way that is not known.
    """

    def __init__(self, folder: Path, config: V4Config) -> None:
        """Open all shards and check names, shapes and dtypes; reads no weights."""
        self._config = config
        self._folder = folder
        self._stack = ExitStack()
        self._where: dict[str, tuple[Path, _File, str]] = {}
        try:
            for path in _weight_files(folder):
                self._open(path)
            self._check()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        """Borrow for a ``with`` block."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close all shards."""
        self._stack.close()

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(cast("_OpenFile", safe_open)(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: is not a whole safetensors file ({error})") from error
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            canonical = canonical_name(name)
            if not is_ignored(canonical):
                self._where[canonical] = path, file, name

    def _check(self) -> None:
        """Refuse what the model cannot use, before anything is read."""
        for name, (path, _, stored) in self._where.items():
            dtype = self._dtype(name)
            if dtype not in self._accepted(name):
                raise ModelLoadError(
                    f"{path}: tensor {stored} is stored as {dtype}; weights may be floats, e4m3 or"
                    f" packed e2m1 with their scales beside them in {scale_name(name)}"
                )
        for name, shape in self._expected():
            if self._is_quantized(name):
                self._check_shape(scale_name(name), scales_shape(shape, self._dtype(name)))
                shape = stored_shape(shape, self._dtype(name))
            self._check_shape(name, shape)

    def _dtype(self, name: str) -> str:
        _, file, stored = self._where[name]
        return file.get_slice(stored).get_dtype()

    def _accepted(self, name: str) -> frozenset[str]:
        if name.endswith(".tid2eid"):
            return _INTEGERS
        if name.endswith(".scale"):
            return SCALE_DTYPES
        if scale_name(name) in self._where:
            return FP8_DTYPES | FP4_DTYPES if ".experts." in name else FP8_DTYPES
        return _FLOATS

    def _is_quantized(self, name: str) -> bool:
        return name.endswith(".weight") and scale_name(name) in self._where and name in self._where

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from model_shapes(self._config).items()
        for number in range(len(self._config.layer_kinds)):
            prefix = f"layers.{number}."
            shapes = layer_shapes(self._config, number)
            if prefix + FUSED_UP in self._where:
                shapes = self._fused_shapes(shapes)
            for name, shape in shapes.items():
                yield prefix + name, shape

    def _fused_shapes(self, shapes: Shapes) -> Shapes:
        c = self._config
        kept = {name: s for name, s in shapes.items() if not name.startswith("ffn.experts.")}
        kept[FUSED_UP] = (c.num_experts, 2 * c.expert_width, c.hidden)
        kept[FUSED_DOWN] = (c.num_experts, c.hidden, c.expert_width)
        return kept

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._where.get(name)
        if found is None:
            raise ModelLoadError(f"{self._folder}: tensor {name} is missing from the checkpoint")
        path, file, stored = found
        actual = tuple(file.get_slice(stored).get_shape())
        if actual != shape:
            raise ModelLoadError(
                f"{path}: tensor {stored} has shape {list(actual)},"
                f" config.json asks for {list(shape)}"
            )

    def tensor(self, name: str) -> Tensor:
        """Return one tensor by canonical name; an expert's part of a fused one included.

        Quantised ones come as float32 numbers.

        Raises:
            ModelLoadError: the bytes cannot be read, or hold a value no model has (NaN, or an
                expert that does not exist).
        """
        if name in self._where:
            return self._read(name, None)
        prefix, _, rest = name.partition("ffn.experts.")
        number, part, _ = rest.split(".")
        expert, width = int(number), self._config.expert_width
        if part == "w2":
            return self._read(prefix + FUSED_DOWN, expert)
        both = self._read(prefix + FUSED_UP, expert)
        return both[:width] if part == "w1" else both[width:]

    def _read(self, name: str, place: int | None) -> Tensor:
        value = self._stored(name, place)
        if self._is_quantized(name):
            value = dequantized(value, self._stored(scale_name(name), None))
        if name.endswith(".tid2eid"):
            bad = bool(((value < 0) | (value >= self._config.num_experts)).any())
        else:
            bad = not bool(torch.isfinite(value).all())
        if bad:
            path, _, stored = self._where[name]
            raise ModelLoadError(f"{path}: tensor {stored} holds values that cannot be weights")
        return value

    def _stored(self, name: str, place: int | None) -> Tensor:
        path, file, stored = self._where[name]
        try:
            return file.get_tensor(stored) if place is None else file.get_slice(stored)[place]
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: tensor {stored} cannot be read ({error})") from error

    def fingerprint(self) -> str:
        """Return a hash of geometry and weights: part of the cache identity.

        Small tensors are hashed whole, large ones by shape and by samples at both ends and in the
        middle, so that opening a large checkpoint does not read it twice.
        """
        digest = hashlib.blake2b(repr(self._config).encode(), digest_size=16)
        for name in sorted(self._where):
            _, file, stored = self._where[name]
            about = file.get_slice(stored)
            shape = about.get_shape()
            digest.update(f"{name} {shape} {about.get_dtype()}".encode())
            for sample in _samples(file.get_tensor(stored)):
                digest.update(sample)
        return digest.hexdigest()


def _samples(value: Tensor) -> Iterator[bytes]:
    flat = value.contiguous().flatten().view(torch.uint8)
    if len(flat) <= _HASHED_WHOLE_NBYTES:
        yield flat.numpy().tobytes()
        return
    middle = len(flat) // 2
    for start in (0, middle, len(flat) - _SAMPLE_NBYTES):
        yield flat[start : start + _SAMPLE_NBYTES].numpy().tobytes()


def _weight_files(folder: Path) -> list[Path]:
    """Return the shards of a folder, by its index where it has one."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        try:
            parsed = msgspec.json.decode(index.read_bytes(), type=_ShardIndex)
        except (msgspec.DecodeError, OSError) as error:
            raise ModelLoadError(f"{index}: is not an index of shards ({error})") from error
        files = [folder / name for name in sorted(set(parsed.weight_map.values()))]
        for path in files:
            if not path.exists():
                raise ModelLoadError(f"{path}: is named by {index.name} but missing")
        return files
    if single.exists():
        return [single]
    raise ModelLoadError(
        f"{folder}: holds neither model.safetensors nor model.safetensors.index.json"
    )


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]
