# pyright: basic, reportAttributeAccessIssue=false
"""Compiling kernels before they are needed, many at once.

What a model will launch is found by letting it launch everything once for nothing: its launches
compile, in threads, and run nothing. Compilation holds Python's lock for a third of its time.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction, KernelInterface

_THREADS = 16


def compile_ahead(launches: Callable[[], None], told: Callable[[int, int], None]) -> int:
    """Compile what ``launches`` would launch; return how many kernels that were.

    Nothing is launched, so what the device holds is neither read nor written. A kernel that does
    not compile is left for its first launch to complain of.

    Args:
        launches: launches kernels, in this thread.
        told: is told after each kernel how many of how many are done; what it raises ends the work.
    """
    with (
        ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "kvlease-compile") as threads,
        AsyncCompileMode(threads, ignore_errors=True) as mode,
    ):
        try:
            with _launching_nothing():
                launches()
            for number, _ in enumerate(as_completed(mode.raw_futures)):
                told(number + 1, len(mode.raw_futures))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return len(mode.raw_futures)


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Let this thread's launches only compile; other threads go on launching."""
    me, launch = threading.get_ident(), KernelInterface.__getitem__

    def choose(kernel: JITFunction[object], grid: object) -> Callable[..., object]:
        is_mine = threading.get_ident() == me
        return partial(kernel.warmup, grid=grid) if is_mine else launch(kernel, grid)

    KernelInterface.__getitem__ = choose
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launch
