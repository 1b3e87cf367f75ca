"""Repairs of Triton's CPU interpreter (3.6 to 3.9), whose narrow floats are silently wrong.

It keeps bf16 as uint16 and fp8 as uint8 and computes with those integers; it truncates to bf16,
loses carries when rounding to fp8 and wraps where the device saturates. Here such operands are
widened to fp32 for each operation and rounded back, as the device does.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Array = np.ndarray[Any, np.dtype[Any]]

_TORCH = {
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _is_narrow(dtype: Any) -> bool:
    return dtype.scalar.name in ("bf16", "fp8e5", "fp8e4nv")


def _convert(data: Array, source: Any, target: Any, rounding: Any) -> Array:
    """Return the bits of ``data`` in another float type, rounded to nearest even."""
    if rounding is not None and rounding != interpreter._ir.ROUNDING_MODE.RTNE:
        raise NotImplementedError("the repaired interpreter rounds to nearest only")
    bits = np.array(data, order="C").view(_BITS[data.itemsize])
    wide = torch.from_numpy(bits).view(_TORCH[source.scalar.name])
    to = _TORCH[target.scalar.name]
    if to.itemsize == 1:
        limit = torch.finfo(to).max
        wide = wide.to(torch.float64 if wide.dtype == torch.float64 else torch.float32)
        wide = wide.clamp(-limit, limit)
    out: Array = wide.to(to).view(torch.uint8).numpy().view(_BITS[to.itemsize])
    return out.reshape(data.shape)


def _wide(handle: Any) -> Array:
    if not _is_narrow(handle.dtype):
        data: Array = handle.data
        return data
    return _convert(handle.data, handle.dtype, tl.float32, None).view(np.float32)


def _like(data: Array, dtype: Any) -> Any:
    """Wrap a result: comparisons stay booleans, numbers go back to the narrow type."""
    if data.dtype != np.bool_ and _is_narrow(dtype):
        data = _convert(data.astype(np.float32), tl.float32, dtype, None)
    return interpreter.TensorHandle(data, dtype.scalar)


def repair() -> None:
    """Patch the interpreter of this process."""
    builder: Any = interpreter.InterpreterBuilder
    plain_binary, plain_unary = builder.binary_op, builder.unary_op
    plain_cast, plain_ternary = builder.cast_impl, builder.ternary_op
    interpreter._convert_float = _convert

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Array]) -> Any:
        if not _is_narrow(lhs.dtype):
            return plain_binary(self, lhs, rhs, op)
        return _like(op(_wide(lhs), _wide(rhs)), lhs.dtype)

    def unary_op(self: Any, arg: Any, op: Callable[..., Array]) -> Any:
        return (
            _like(op(_wide(arg)), arg.dtype)
            if _is_narrow(arg.dtype)
            else plain_unary(self, arg, op)
        )

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Callable[..., Array]) -> Any:
        if not _is_narrow(other.dtype):
            return plain_ternary(self, lhs, rhs, other, op)
        return _like(op(_wide(lhs), _wide(rhs), _wide(other)), other.dtype)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if not _is_narrow(src.dtype) and not _is_narrow(dst_type):
            return plain_cast(self, src, dst_type)
        if _is_narrow(dst_type):
            source = src.dtype if src.dtype.scalar.name in _TORCH else tl.float64
            data = src.data if source is src.dtype else src.data.astype(np.float64)
            return interpreter.TensorHandle(_convert(data, source, dst_type, None), dst_type.scalar)
        data = _wide(src).astype(interpreter._get_np_dtype(dst_type))
        return interpreter.TensorHandle(data, dst_type.scalar)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
        product = np.matmul(_wide(a).astype(d.data.dtype), _wide(b).astype(d.data.dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return _like(_wide(x) * _wide(y) + _wide(z), z.dtype)

    builder.binary_op, builder.unary_op, builder.ternary_op = binary_op, unary_op, ternary_op
    builder.cast_impl, builder.create_dot, builder.create_fma = cast_impl, create_dot, create_fma
    _index_scalars()
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        _refuse_narrow(kind)


def _index_scalars() -> None:
    """Let loop bounds be tensors: numpy 2.4 takes no array of one element as an integer."""
    plain = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _refuse_narrow(kind: Any) -> None:
    """Make reductions of narrow floats an error: kernels reduce in fp32."""
    plain = kind.apply

    def apply(self: Any, given: Any) -> Any:
        tensors = given if isinstance(given, tuple) else (given,)
        if any(_is_narrow(tensor.dtype) for tensor in tensors):
            raise NotImplementedError("widen to fp32 before reducing")
        return plain(self, given)

    kind.apply = apply
