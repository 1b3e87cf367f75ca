"""A kernel that is launched again and again with arguments of one kind.

Triton looks a kernel up at each launch, by its arguments: that costs more than launching it does,
and a load launches a dozen. Here it is looked up once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

import torch
from torch import Tensor


class Kernel(Protocol):
    """A kernel of Triton, compiled or not."""

    def __getitem__(self, grid: tuple[int, int, int], /) -> Callable[..., Kernel | None]:
        """Return what launches it with so many programs."""
        ...


@final
class Launches:
    """Launches one kernel with a fixed number of warps.

    Ownership: the first arguments decide how it is compiled. Later ones are of the same types,
    their tensors aligned as those were; integers are not specialised.
    """

    def __init__(self, kernel: Kernel, num_warps: int) -> None:
        """Compile nothing yet."""
        self._kernel = kernel
        self._num_warps = num_warps
        self._compiled: Kernel | None = None

    def __call__(self, programs: int, stream: torch.cuda.Stream, *given: object) -> None:
        """Queue so many programs on a stream."""
        grid = programs, 1, 1
        if self._compiled is not None:
            # An address costs less than a tensor, which would be asked for it and where it is.
            plain = [each.data_ptr() if isinstance(each, Tensor) else each for each in given]
            self._compiled[grid](*plain, stream=stream.cuda_stream)
            return
        with torch.cuda.stream(stream):
            self._compiled = self._kernel[grid](*given, num_warps=self._num_warps)
