"""Copies by the device's copy engines, in batches or by pitch; no multiprocessor is used.

For a batch the driver takes arrays of addresses and sizes. The call holds neither Python's lock nor
the device; it costs half a microsecond a copy, so copies should be large (100 KB and up). Rows at
even distances are one copy, however many they are. Measured on an H200, 128 pieces of 32, 128, 256
and 512 KB: a batch takes the host 63 to 69 us and comes at 29.6, 45, 49.5 and 52.4 GB/s; as rows of
one copy 4 to 6 us, at 50.9, 54.1, 54.7 and 55; as rows of 16 copies 50 us, at 34, 47.5, 51 and 53.
"""

import ctypes
import threading
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


_UNIFIED = 4
"""A memory type: whose memory it is follows from the address."""
_NUMBERS = 16
_SOURCE_KIND, _SOURCE, _SOURCE_PITCH = 2, 4, 6
_TARGET_KIND, _TARGET, _TARGET_PITCH, _WIDTH, _ROWS = 9, 11, 13, 14, 15
"""Of CUDA_MEMCPY2D, which is eight bytes a field: positions within arrays and such stay 0."""


@final
class CopyEngine:
    """The driver's copies, for one device and one thread at a time."""

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
        self._copy_rows = driver.cuMemcpy2DAsync_v2
        self._copy_rows.argtypes = [pointer, pointer]
        self._rows = (ctypes.c_size_t * _NUMBERS)()
        self._rows[_SOURCE_KIND] = self._rows[_TARGET_KIND] = _UNIFIED
        self._rows_at = ctypes.addressof(self._rows)
        self._set_context = driver.cuCtxSetCurrent
        self._context = ctypes.c_void_p()
        self._thread = 0
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

    def _enter(self) -> None:
        """Make the device's context current in the calling thread, once."""
        thread = threading.get_ident()
        if thread != self._thread:
            self._set_context(self._context)
            self._thread = thread

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
        self._enter()
        error = self._copy(*self._addresses, count, *self._rest, stream.cuda_stream)
        if error:
            raise OperatingError(
                f"the CUDA driver refused {count} copies with error {error} (see CUresult in its"
                " manual); the default stream takes no batches"
            )

    def copy_rows(
        self,
        target: Place,
        source: Place,
        counts: Numbers,
        part: tuple[int, int],
        sizes: tuple[int, int, int],
        stream: torch.cuda.Stream,
    ) -> None:
        """Queue the copies part[0] to part[1] - 1 on a stream, each of ``counts`` rows.

        ``sizes`` are a row's bytes, and those from row to row at the target and at the source.

        Raises OperatingError when the driver refuses one.
        """
        rows = self._rows
        rows[_WIDTH], rows[_TARGET_PITCH], rows[_SOURCE_PITCH] = sizes
        self._enter()
        for number in range(*part):
            rows[_TARGET] = target[0] + int(target[1][number])
            rows[_SOURCE] = source[0] + int(source[1][number])
            rows[_ROWS] = int(counts[number])
            error = self._copy_rows(self._rows_at, stream.cuda_stream)
            if error:
                raise OperatingError(
                    f"the CUDA driver refused a copy of {rows[_ROWS]} rows with error {error} (see"
                    " CUresult in its manual)"
                )
