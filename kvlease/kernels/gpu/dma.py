"""Batches of copies by the device's copy engines: one driver call, no multiprocessor is used.

The driver takes arrays of addresses and sizes. The call holds neither Python's lock nor the device;
it costs about a microsecond a copy, so copies should be large (100 KB and up).
"""

import ctypes
from functools import cache
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from kvlease.errors import OperatingError

Addresses = npt.NDArray[np.uint64]


_STREAM_ORDER = 1
_OVERLAP_WITH_COMPUTE = 1
"""Of CUmemcpyAttributes: sources are read in stream order; the driver may leave the SMs alone."""


@final
class CopyEngine:
    """The driver's batch copy, for the context that is current where this is made."""

    def __init__(self, flags: int = _OVERLAP_WITH_COMPUTE) -> None:
        """Find the driver's entry; raises OperatingError where it has none (before CUDA 12.8)."""
        driver = ctypes.CDLL("libcuda.so.1")
        # The second version lost the parameter that tells which copy failed.
        self._tells_failed = not hasattr(driver, "cuMemcpyBatchAsync_v2")
        name = "cuMemcpyBatchAsync" if self._tells_failed else "cuMemcpyBatchAsync_v2"
        if not hasattr(driver, name):
            raise OperatingError("the CUDA driver has no batch copies; install driver 570 or later")
        self._copy = getattr(driver, name)
        self._set_context = driver.cuCtxSetCurrent
        self._context = ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(self._context))
        # access order, two location hints of two numbers each, flags
        self._attributes = (ctypes.c_int * 6)(_STREAM_ORDER, 0, 0, 0, 0, flags)
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)

    def copy(
        self,
        targets: Addresses,
        sources: Addresses,
        sizes: Addresses,
        part: tuple[int, int],
        stream: torch.cuda.Stream,
    ) -> None:
        """Queue the copies part[0] to part[1] - 1 on a stream; the arrays are free on return.

        Raises OperatingError when the driver refuses them.
        """
        first, last = part
        skip = 8 * first
        after: tuple[object, ...] = (ctypes.c_void_p(stream.cuda_stream),)
        if self._tells_failed:
            after = (ctypes.byref(self._failed), *after)
        self._set_context(self._context)
        error = self._copy(
            ctypes.c_void_p(targets.ctypes.data + skip),
            ctypes.c_void_p(sources.ctypes.data + skip),
            ctypes.c_void_p(sizes.ctypes.data + skip),
            ctypes.c_size_t(last - first),
            ctypes.byref(self._attributes),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            *after,
        )
        if error:
            raise OperatingError(
                f"the CUDA driver refused {last - first} copies with error {error}; see"
                " CUresult in its manual"
            )


@cache
def copy_engine(device_index: int) -> CopyEngine:
    """Return the copy engine of one device; makes its context current if there is none."""
    torch.cuda.set_device(device_index)
    torch.cuda.current_stream(device_index).synchronize()
    return CopyEngine()
