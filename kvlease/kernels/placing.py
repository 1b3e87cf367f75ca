"""Moving a step's numbers between host memory and where the arithmetic is, without waiting."""

import torch
from torch import Tensor

CPU = torch.device("cpu")


def place(values: Tensor, device: torch.device) -> Tensor:
    """Return host values on the device; the same tensor where the device is the CPU.

    Ownership: the result is in the order of the current stream. The pinned copy in between belongs
    to torch's host allocator, which gives it out again only after the stream has read it (R13).
    """
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def fetch(values: Tensor) -> Tensor:
    """Return a copy of device values in pinned host memory, true once the stream has got there.

    Values of the CPU are returned as they are.
    """
    if values.device.type == "cpu":
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)
