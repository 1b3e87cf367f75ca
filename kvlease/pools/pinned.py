"""Host memory that a GPU reads and writes by itself.

Registered in place, because torch's own pinned memory takes the next power of two. This module does
not know what is kept in it.
"""

import mmap
from typing import Protocol, cast
from weakref import finalize

import numpy as np
import torch


class _Runtime(Protocol):
    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...


def pinned_bytes(nbytes: int) -> torch.Tensor:
    """Return zeroed bytes [nbytes] that a GPU can reach; raises RuntimeError if it cannot.

    The memory is let go with the last tensor that shows it: keep one until the device is done.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    region.madvise(mmap.MADV_DONTFORK)  # sharing with a child would let pages move under the device
    memory = np.frombuffer(region, dtype=np.uint8)
    runtime = cast("_Runtime", torch.cuda.cudart())  # type: ignore[no-untyped-call]
    address: int = memory.ctypes.data
    status = int(runtime.cudaHostRegister(address, nbytes, 0))
    if status:
        raise RuntimeError(f"cudaHostRegister failed with status {status}")
    # The array goes before the region under it; the driver must have let go of both by then.
    unpin = finalize(memory, runtime.cudaHostUnregister, address)
    unpin.atexit = False
    return torch.from_numpy(memory)
