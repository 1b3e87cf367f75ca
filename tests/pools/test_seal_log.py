"""What the log says of sealed pages: where in its sequence each one stands (R10)."""

from array import array

from kvlease.pools.held import Held
from kvlease.pools.memory import PoolSizes
from kvlease.pools.unified import UnifiedPool
from kvlease.protocols.event_pages import PageSeal
from kvlease.protocols.geometries import gqa_schema
from kvlease.runtime.event_log import EventLog

PAGE = 4
ROOT = b"root"


def tokens_of(*pages: int) -> bytes:
    return b"".join(array("i", [page] * PAGE).tobytes() for page in pages)


def test_a_seal_names_the_place_of_the_pages_that_were_taken() -> None:
    """Two sequences computed the same pages; the later one has some that the index lacked.

    Its equals of what was there already stay its own, and come first in its table.
    """
    log = EventLog(level="audit")
    seals = log.remember()
    pool = UnifiedPool(gqa_schema(1, 1, 4, PAGE), PoolSizes(16, 0, 0, 0, 4), log)
    prompt = tokens_of(1, 2, 3, 4, 5)

    def start(request: int) -> Held:
        held = pool.open(pool.match(ROOT, prompt, 0), 5, request)
        assert held is not None
        assert pool.grow(held, 5, request)
        return held

    first, second, third = start(1), start(2), start(3)
    pool.seal(first, prompt[: 4 * PAGE * 2], 2, 1)
    pool.seal(second, prompt[: 4 * PAGE * 4], 4, 2)
    pool.seal(third, prompt, 5, 3)
    found = [
        (event.request, event.start // PAGE, [page for page, _, _ in event.pages])
        for event in seals
        if isinstance(event, PageSeal)
    ]
    assert found == [
        (1, 0, [first.lease.pages[0]]),
        (2, 2, [second.lease.pages[2]]),
        (3, 4, [third.lease.pages[4]]),
    ]
