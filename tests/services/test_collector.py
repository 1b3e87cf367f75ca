"""The collector is set aside for serving only, and what dies meanwhile is not lost."""

import gc
import weakref

import pytest

from kvlease.services.collector import collecting_less


class _Ring:
    """Garbage that only the collector can find."""

    def __init__(self) -> None:
        self.me = self


def test_what_is_alive_is_set_aside_and_comes_back() -> None:
    before, old = gc.get_threshold(), _Ring()
    died = weakref.ref(old)
    with pytest.raises(KeyError), collecting_less():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[0] > before[0]
        young = weakref.ref(_Ring())
        del old
        gc.collect()
        assert young() is None
        assert died() is not None
        raise KeyError
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
    gc.collect()
    assert died() is None
