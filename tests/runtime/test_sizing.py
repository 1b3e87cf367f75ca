"""How big an engine's pools become: what a device has free, less what running costs."""

import pytest
from attrs import evolve

from kvlease.errors import ConfigError
from kvlease.pools.storage import RingStore, SpanStore, TailStore
from kvlease.protocols.config import EngineConfig
from kvlease.protocols.geometries import V4Geometry, deepseek_v4_schema
from kvlease.runtime.sizing import SPARE_NBYTES, pages_that_fit, pool_sizes, sized

GEOMETRY = V4Geometry(("sliding", "sparse", "heavy"), 64, 16, 32, 64)
SCHEMA = deepseek_v4_schema(GEOMETRY, 256, "bfloat16", "fp8", "fp8")
CONFIG = EngineConfig(device="cuda", device_pages=0, max_sessions=4)


@pytest.mark.parametrize("device_tails", [None, 3])
def test_the_memory_really_taken_fits_and_one_more_page_would_not(device_tails: int | None) -> None:
    """Too many pages and the first long prompt dies of it; too few waste what was paid for."""
    config = evolve(CONFIG, device_tails=device_tails)
    free = SPARE_NBYTES + (40 << 20)
    pages = pages_that_fit(config, SCHEMA, free)
    taken: list[int] = []
    for count in (pages, pages + config.tail_every):
        sizes = pool_sizes(evolve(config, device_pages=count), needs_tail=True)
        spans, tails = SpanStore(SCHEMA, count), TailStore(SCHEMA, sizes.device_tails)
        rings = RingStore(SCHEMA, sizes.slots)
        kept = sum(kept.nbytes for kept in tails.memory.values())
        running = sum(
            rings.ring(layer.id, tail.name).nbytes
            for layer in SCHEMA.layers
            for tail in layer.tails
        )
        taken.append(spans.nbytes + kept + running)
    assert taken[0] <= free - SPARE_NBYTES < taken[1]


def test_a_device_that_is_full_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"2\.1 GB of device memory are free, and 4 sessions"):
        pages_that_fit(CONFIG, SCHEMA, SPARE_NBYTES)


def test_a_size_that_was_given_stands() -> None:
    config = evolve(CONFIG, device_pages=7)
    assert sized(config, SCHEMA) is config
    with pytest.raises(ConfigError, match="device_pages is 0"):
        EngineConfig(device_pages=0)
