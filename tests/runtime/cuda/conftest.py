"""The devices that these tests run on."""

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.cuda.devices import CudaDevice, Device, ThreadDevice


@pytest.fixture(params=["threads", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device made of threads, and a real one where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    made = CudaDevice() if request.param == "cuda" else ThreadDevice()
    yield made
    made.close()
