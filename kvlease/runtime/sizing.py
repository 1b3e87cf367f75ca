"""How much memory an engine sets aside: from its configuration, and from what a device has left.

Knows sizes, not what lies in the memory.
"""

import torch
from attrs import evolve

from kvlease.errors import ConfigError
from kvlease.pools.memory import PoolSizes
from kvlease.protocols.config import MAX_PAGES, EngineConfig
from kvlease.protocols.schema import Schema

SPARE_NBYTES = 2 << 30
SPARE_SHARE = 0.08
"""Left to the model's activations, graphs and staging: the larger of the two, of what is free."""
_TAILS_PER_SEQUENCE = 2
"""A running sequence's tail at its last boundary, and the one that takes its place."""


def pool_sizes(config: EngineConfig, *, needs_tail: bool) -> PoolSizes:
    """Return how much memory to set aside, tails included.

    Unless given, there are tails for every ``tail_every`` pages and two for each running sequence.
    """
    if not needs_tail:
        return PoolSizes(config.device_pages, config.host_pages, 0, 0, config.max_sessions)
    running = _TAILS_PER_SEQUENCE * config.max_sessions
    device = config.device_tails or config.device_pages // config.tail_every + running
    host = config.host_tails or config.host_pages // config.tail_every + running
    if not config.host_pages:
        host = 0
    return PoolSizes(config.device_pages, config.host_pages, device, host, config.max_sessions)


def sized(config: EngineConfig, schema: Schema) -> EngineConfig:
    """Return the configuration with the device tier's size, where it leaves that open.

    Call it when the model is on the device: the tier gets what is left. Raises ConfigError when
    that is too little for a single page.
    """
    if config.device_pages:
        return config
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return evolve(config, device_pages=pages_that_fit(config, schema, free))


def pages_that_fit(config: EngineConfig, schema: Schema, free: int) -> int:
    """Return how many pages, with their share of kept tails, ``free`` bytes of a device hold."""
    running = config.max_sessions
    tails = config.device_tails or _TAILS_PER_SEQUENCE * running
    rings = sum(t.ring_rows * t.format.nbytes for layer in schema.layers for t in layer.tails)
    taken = max(SPARE_NBYTES, free * SPARE_SHARE) + running * rings + tails * schema.tail_nbytes
    tail_share = 0.0 if config.device_tails else schema.tail_nbytes / config.tail_every
    count = int((free - taken) // (schema.page_nbytes + tail_share))
    if count < 1:
        raise ConfigError(
            f"{free / 1e9:,.1f} GB of device memory are free, and {running} sessions leave none of"
            " it for pages: give fewer sessions, or a device with more memory"
        )
    return min(count, MAX_PAGES)
