"""The eviction orders: the lazy heap, what is planned for write-back, and S3-FIFO's queues."""

import gc
import signal
from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvlease.pools.eviction import LazyHeap
from kvlease.pools.prefix_index import Policy, PrefixIndex
from kvlease.pools.prefix_node import Node, Tail
from tests.pools.prefix_pair import PAGE_BYTES, Pair, tokens_of


@given(st.lists(st.tuples(st.sampled_from(["push", "discard", "pop"]), st.integers(0, 9),
                          st.integers(0, 20)), max_size=300))  # fmt: skip
def test_lazy_heap_equals_a_dictionary(calls: list[tuple[str, int, int]]) -> None:
    """Otherwise recent pages go before old ones."""
    heap: LazyHeap[int] = LazyHeap()
    keys: dict[int, int] = {}
    for call, item, key in calls:
        if call == "push":
            heap.push(item, key)
            keys[item] = key
        elif call == "discard":
            heap.discard(item)
            keys.pop(item, None)
        elif (entry := heap.pop()) is None:
            assert not keys
        else:
            assert entry[0] == min(keys.values()) == keys.pop(entry[1])
        assert len(heap) == len(keys)
        assert heap.first_key() == min(keys.values(), default=None)


def test_lazy_heap_stays_small() -> None:
    """Otherwise a server that never fills its cache fills its memory with old entries."""
    heap: LazyHeap[int] = LazyHeap()
    for key in range(10_000):
        heap.push(key % 3, key)
    assert len(heap._entries) < 100


def serve(index: PrefixIndex, values: list[int], first_page: int) -> int:
    """Serve one request for pages that each repeat a number; return the pages it hit."""
    tokens = b"".join(value.to_bytes(PAGE_BYTES, "big") for value in values)
    match = index.match(b"a", tokens, len(values))
    count = len(values) - match.num_pages
    pages = array("i", range(first_page, first_page + count))
    index.extend(match.cursor, tokens, pages)
    index.release(match.cursor)
    return match.num_pages


def test_write_back_plans_what_goes_next() -> None:
    """Otherwise write-back stores pages that stay and drops pages that go."""
    pair = Pair(needs_tail=False)
    for values in ([0, 0, 0], [0, 1], [2, 2]):
        sequence = pair.match(b"a", values, 9)
        pair.extend(sequence, values[sequence.match.num_pages :], whole=True)
        pair.release(sequence)
    nodes = pair.index.evictable_unstored(3)
    planned = [page for node in nodes for page in reversed(node.device.pages or ())]
    pair.compare()
    assert pair.index.evict_device(3, can_drop=False).device_pages == array("i")
    assert list(pair.index.evict_device(3).device_pages) == planned


def test_write_back_plan_skips_what_is_stored() -> None:
    """Otherwise pages are stored twice."""
    pair = Pair(needs_tail=False)
    sequence = pair.match(b"a", [0, 1, 2], 9)
    pair.extend(sequence, [0, 1, 2], whole=True)
    pair.store(sequence, "store")
    pair.release(sequence)
    assert pair.index.evictable_unstored(3) == []
    pair.arrived("store")
    assert pair.index.evictable_unstored(3) == []
    assert pair.evict("device", 3, can_drop=False) == 3


def test_s3fifo_lets_a_scan_pass() -> None:
    """Otherwise one long scan of new prompts empties the cache of what is asked for often."""
    hits: dict[Policy, int] = {}
    policies: tuple[Policy, Policy] = ("lru", "s3fifo")
    for policy in policies:
        index = PrefixIndex(PAGE_BYTES, needs_tail=False, policy=policy)
        page = 0
        for _ in range(4):
            serve(index, [0, 0, 0, 0], page)
            page += 4
        for number in range(1, 60):
            serve(index, [10 * number + offset for offset in range(5)], page)
            page += 5
            index.evict_device(max(0, index.statistics().device_pages - 20))
            index.check()
        hits[policy] = serve(index, [0, 0, 0, 0], page)
    assert hits == {"lru": 0, "s3fifo": 4}


def test_s3fifo_remembers_what_it_evicted() -> None:
    """Otherwise a prefix that returns late is unproven for ever."""
    index = PrefixIndex(PAGE_BYTES, needs_tail=False, policy="s3fifo")
    serve(index, [0, 0], 0)
    serve(index, [1], 2)
    assert sorted(index.evict_device(2).device_pages) == [0, 1]
    serve(index, [0, 0, 2], 3)
    serve(index, [2], 6)
    # The returned pages stand in the main queue; its new end page does not.
    assert list(index.evict_device(2).device_pages) == [2, 5]
    index.check()


def test_s3fifo_ends_although_a_hit_that_was_spent_is_taken_back() -> None:
    """Found by the scenario ``keeping``: whoever looked at a prefix while it was loaded, and drops
    it afterwards, left its edge with fewer hits than it had spent, and eviction never ended.
    """

    def give_up(_signal: int, _frame: object) -> None:
        raise AssertionError("the eviction does not end")

    index = PrefixIndex(PAGE_BYTES, needs_tail=False, policy="s3fifo")
    tokens = bytes(PAGE_BYTES) + (1).to_bytes(PAGE_BYTES, "big")
    serve(index, [0, 1], 0)
    match = index.match(b"a", tokens, 2)
    index.attach_host([match.cursor.node], array("i", [0, 1]), None)
    index.release(match.cursor)
    index.evict_device(2)  # which remembers it, so that it comes back into the main queue
    looking = index.match(b"a", tokens, 2)
    index.attach_device(looking.to_load, array("i", [2, 3]), "load")
    index.arrived("load")
    index.abandon(looking.cursor)
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    try:
        assert sorted(index.evict_device(2).device_pages) == [2, 3]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    index.check()


def count_records() -> int:
    # By its type alone: asking a stranger for its ``__class__`` may make it warn.
    return sum(issubclass(type(item), Node | Tail) for item in gc.get_objects())


def test_evicted_edges_need_no_collector() -> None:
    """Otherwise an engine that turns the collector off keeps the tokens of all it ever served."""
    gc.collect()
    gc.disable()
    try:
        index = PrefixIndex(PAGE_BYTES, needs_tail=True)
        before = count_records()
        cursor = index.match(b"a", b"", 0).cursor
        index.extend(cursor, tokens_of([0, 1]), array("i", [0, 1]))
        index.put_tail(cursor, 2, 0)
        index.attach_host([cursor.node], array("i", [0, 1]), "store")
        index.release(cursor)
        index.arrived("store")
        assert count_records() == before + 3
        index.evict_device(2)
        index.evict_host(2)
        assert count_records() == before
    finally:
        gc.enable()
