"""What stands in for a device's streams and copy engines where kernels are interpreted."""

import ctypes

import pytest
import torch
from torch import Tensor

from kvlease.kernels.gpu.dma import Numbers, Place


class InOrder:
    """A stream, an event and a context in one, where everything happens when it is queued."""

    device = torch.device("cpu")
    device_index = 0

    def __init__(self, *_given: object, **_named: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_error: object) -> None:
        pass


class HostEngine:
    """Copies at once, in place of the device's engines."""

    def copy(
        self,
        target: Place,
        source: Place,
        sizes: Numbers,
        part: tuple[int, int],
        _stream: object,
    ) -> None:
        for at in range(*part):
            to, begin = target[0] + int(target[1][at]), source[0] + int(source[1][at])
            ctypes.memmove(to, begin, int(sizes[at]))

    def copy_rows(
        self,
        target: Place,
        source: Place,
        counts: Numbers,
        part: tuple[int, int],
        sizes: tuple[int, int, int],
        _stream: object,
    ) -> None:
        width, to_next, from_next = sizes
        for at in range(*part):
            to, begin = target[0] + int(target[1][at]), source[0] + int(source[1][at])
            for row in range(int(counts[at])):
                ctypes.memmove(to + row * to_next, begin + row * from_next, width)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's streams and the copy engines be the calling thread."""
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, InOrder)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr("kvlease.kernels.gpu.staging.CopyEngine", lambda _device: HostEngine())
