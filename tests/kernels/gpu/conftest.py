"""Triton kernels run for real where there is a CUDA device, else in Triton's interpreter."""

import importlib.util
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif not HAS_CUDA:
    # before Triton is loaded: its own library functions are decorated on import
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.gpu import interpreter

    interpreter.repair()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes in the interpreter; a device, or --full, runs it."""
    if HAS_CUDA or config.getoption("--full"):
        return
    for item in items:
        if "tests/kernels/gpu/" in item.nodeid and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="minutes in Triton's interpreter: --full"))


@pytest.fixture
def device() -> str:
    """Where the test's tensors live; on "cpu" kernels are interpreted, so sizes must be tiny."""
    return "cuda" if HAS_CUDA else "cpu"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stream to work on and copy engines: those of the device, or what stands in for them."""
    if not HAS_CUDA:
        from tests.kernels.gpu.in_order import stand_in

        stand_in(monkeypatch)
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


@pytest.fixture(autouse=True)
def _quiet_numpy() -> Iterator[None]:
    """Masked lanes overflow and divide by zero on the device too, without a warning."""
    with np.errstate(all="ignore"):
        yield
