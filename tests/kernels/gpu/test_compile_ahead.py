"""Kernels compiled before they are needed: all that steps launch, though nothing is launched."""

from collections.abc import Callable

import pytest
import triton
from triton.runtime.jit import KernelInterface

from kvlease.kernels.gpu.compile_ahead import compile_ahead
from tests.kernels.gpu.test_device_model import CONFIG, drive, make_model


class Stopped(Exception):
    """What a caller ends the work with."""


def test_launches_are_as_before_once_it_has_failed() -> None:
    plain: Callable[..., object] = KernelInterface.__getitem__

    def launches() -> None:
        assert KernelInterface.__getitem__ is not plain
        raise Stopped

    with pytest.raises(Stopped):
        compile_ahead(launches, lambda done, total: None)
    assert KernelInterface.__getitem__ is plain


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels compiled for their launch, as they come."""
    names: list[str] = []

    def note(*, fn: object, **_: object) -> None:
        names.append(str(getattr(fn, "name", fn)))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return names


@pytest.mark.gpu
def test_steps_compile_little_more(device: str, compiled: list[str]) -> None:
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    model = make_model(CONFIG, "fp8", device, by_kernels=True)
    told: list[tuple[int, int]] = []
    count = model.compile_ahead(2, 8, lambda done, total: told.append((done, total)))
    assert told[-1] == (count, count)
    compiled.clear()
    drive(model, 40, seed=1)
    assert len(compiled) * 10 < count, compiled


@pytest.mark.gpu
def test_a_caller_can_end_it(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    model = make_model(CONFIG, "bf16", device, by_kernels=True)

    def told(_done: int, _total: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        model.compile_ahead(2, 8, told)
