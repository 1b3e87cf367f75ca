"""What a head may say at most: far above any real model and pool, far below what memory holds."""

from kvlease.protocols.events import LogOpen

MAX_LAYERS = 1 << 12
MAX_PAGE_TOKENS = 1 << 20
MAX_POOL_PAGES = 1 << 24
"""Pages of a pool; the checker keeps some fifty bytes for each."""
MAX_NBYTES = 1 << 40
"""Bytes that one component has in one page, or in one tail."""


def beyond_bounds(head: LogOpen) -> str:
    """Return what no model or pool can be like, as the end of a sentence; empty if all can."""
    for name, value, least, most in (
        ("num_layers", head.num_layers, 1, MAX_LAYERS),
        ("page_tokens", head.page_tokens, 1, MAX_PAGE_TOKENS),
        ("device_pages", head.device_pages, 0, MAX_POOL_PAGES),
        ("host_pages", head.host_pages, 0, MAX_POOL_PAGES),
    ):
        if not least <= value <= most:
            return f"{name} {value}, and it reads {least:,} to {most:,}"
    for component in head.components:
        if not 0 <= component.nbytes <= MAX_NBYTES:
            name, nbytes = component.name, component.nbytes
            return f"component {name} of {nbytes} bytes, and it reads 0 to {MAX_NBYTES:,}"
        for layer in component.layers:
            if not 0 <= layer < head.num_layers:
                return f"component {component.name} of layer {layer} of {head.num_layers}"
    return ""
