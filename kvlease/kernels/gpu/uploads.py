"""Numbers on their way to a device: which pages a transfer moves.

torch's way, a pinned copy and a new tensor on the device, takes the host 100 us.
"""

from typing import final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlease.kernels.gpu.dma import CopyEngine

TURNS = 4
_FIRST = np.zeros(1, dtype=np.uint64)


@final
class Uploads:
    """Sends numbers for the transfers of one stream, one after the other.

    There is one place on the device: what the stream was given before has read it by then. Those on
    the host take turns. Ownership: owns both; one thread at a time uses it.
    """

    def __init__(self, capacity: int, engine: CopyEngine, device: torch.device) -> None:
        """Allocate places for so many numbers."""
        shape, on_device = (TURNS, capacity), device.type == "cuda"
        self._host = torch.empty(shape, dtype=torch.int64, pin_memory=on_device)
        self._places = self._host.numpy()
        self._read = [torch.cuda.Event() for _ in range(TURNS)]
        self._there = torch.empty(capacity, dtype=torch.int64, device=device)
        self._engine = engine
        self._turn = 0
        self._sent: npt.NDArray[np.int64] | None = None

    def renew(self, numbers: npt.NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Send numbers again if others were sent meanwhile."""
        if self._sent is not numbers:
            self.send(numbers, stream)

    def send(self, numbers: npt.NDArray[np.int64], stream: torch.cuda.Stream) -> Tensor:
        """Queue the numbers [n] on the stream; return where they are until the next are sent."""
        self._sent = numbers
        turn = self._turn
        self._turn = (turn + 1) % TURNS
        self._read[turn].synchronize()
        place = self._places[turn]
        place[: len(numbers)] = numbers
        target, source = (self._there.data_ptr(), _FIRST), (place.ctypes.data, _FIRST)
        sizes = np.array([numbers.nbytes], dtype=np.uint64)
        self._engine.copy(target, source, sizes, (0, 1), stream)
        self._read[turn].record(stream)
        return self._there[: len(numbers)]
