"""Batches of copies by the device's copy engines: one driver call, no multiprocessor is used.

The driver takes arrays of addresses and sizes. The call holds neither Python's lock nor the device;
it costs about a microsecond a copy, so copies should be large (100 KB and up).
"""

import ctypes
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from kvlease.errors import OperatingError

Numbers = npt.NDArray[np.uint64]
Place = tuple[int, Numbers]
"""Where copies begin: an address, and bytes from there for each copy."""

_STREAM_ORDER = 1
_OVERLAP_WITH_COMPUTE = 1
"""Of CUmemcpyAttributes: sources are read in stream order; the driver may leave the SMs alone."""
_FIRST_CAPACITY = 1024


@final
class CopyEngine:
    """The driver's batch copy, for one device and one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        """Find the driver's entry; raises OperatingError where it has none (before CUDA 12.8)."""
        driver = ctypes.CDLL("libcuda.so.1")
        # The second version lost the parameter that tells which copy failed.
        self._tells_failed = not hasattr(driver, "cuMemcpyBatchAsync_v2")
        name = "cuMemcpyBatchAsync" if self._tells_failed else "cuMemcpyBatchAsync_v2"
        if not hasattr(driver, name):
            raise OperatingError("the CUDA driver has no batch copies; install driver 570 or later")
        self._copy = getattr(driver, name)
        pointer, number = ctypes.c_void_p, ctypes.c_size_t
        failed = [pointer] if self._tells_failed else []
        self._copy.argtypes = [*[pointer] * 3, number, pointer, pointer, number, *failed, pointer]
        self._set_context = driver.cuCtxSetCurrent
        self._context = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context the current one
            driver.cuCtxGetCurrent(ctypes.byref(self._context))
        # access order, two location hints of two numbers each, flags
        attributes = (ctypes.c_int * 6)(_STREAM_ORDER, 0, 0, 0, 0, _OVERLAP_WITH_COMPUTE)
        first, failed_one = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._kept = attributes, first, failed_one
        self._rest = [ctypes.addressof(attributes), ctypes.addressof(first), 1]
        if self._tells_failed:
            self._rest.append(ctypes.addressof(failed_one))
        self._reserve(_FIRST_CAPACITY)

    def _reserve(self, count: int) -> None:
        self._arrays = np.empty((3, count), dtype=np.uint64)
        begin = self._arrays.ctypes.data
        self._addresses = tuple(begin + 8 * count * row for row in range(3))

    def copy(
        self,
        target: Place,
        source: Place,
        sizes: Numbers,
        part: tuple[int, int],
        stream: torch.cuda.Stream,
    ) -> None:
        """Queue the copies part[0] to part[1] - 1 on a stream; the arrays are free on return.

        Raises OperatingError when the driver refuses them.
        """
        first, last = part
        count = last - first
        if count > self._arrays.shape[1]:
            self._reserve(2 * count)
        arrays = self._arrays
        np.add(target[1][first:last], target[0], out=arrays[0, :count])
        np.add(source[1][first:last], source[0], out=arrays[1, :count])
        arrays[2, :count] = sizes[first:last]
        self._set_context(self._context)
        error = self._copy(*self._addresses, count, *self._rest, stream.cuda_stream)
        if error:
            raise OperatingError(
                f"the CUDA driver refused {count} copies with error {error} (see CUresult in its"
                " manual); the default stream takes no batches"
            )
