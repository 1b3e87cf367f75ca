"""Python's garbage collector while a process serves: less often, and not over what was there.

A full collection looks at everything that is alive. Torch's modules alone are some 200,000 objects
that never become garbage, and a run of thousands of requests would look at them dozens of times: a
fifth of its time. So what is alive when serving begins is set aside for its length. Only whole
processes of ours do this; the library leaves its host's collector alone.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

_YOUNG = 10_000
"""Containers made before the youngest are looked at; Python's own 700 is for small programs."""


@contextmanager
def collecting_less() -> Generator[None]:
    """Set aside what is alive now, and collect less often, for a block; both are undone behind it.

    What was set aside and dies within the block is collected after it.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
