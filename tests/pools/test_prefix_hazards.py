"""Each known way in which a prefix index has served wrong pages, leaked some, or lost its place."""

from array import array

import pytest

from kvlease.errors import LedgerImbalance, UsageError
from kvlease.pools.prefix_index import PrefixIndex
from kvlease.pools.prefix_node import Released
from tests.pools.prefix_pair import PAGE_BYTES, Pair, Sequence, tokens_of

CHAIN = [0, 1, 2, 0]


def stored_chain(pair: Pair, values: list[int]) -> None:
    """Leave a prefix on the host only, with a tail on both tiers at its end."""
    sequence = pair.match(b"a", values, 9)
    pair.load(sequence, "load")
    pair.arrived("load")
    pair.extend(sequence, values[sequence.match.num_pages :], whole=True)
    if pair.index._needs_tail:
        pair.put_tail(sequence, len(values))
        unstored = [both for both in pair.tails() if both[0].host.slot is None]
        pair.load_tail(*unstored[0], "host", "tail store")
    pair.store(sequence, "store")
    pair.arrived("store")
    pair.arrived("tail store")
    pair.release(sequence)
    pair.evict("device", 99, can_drop=False)
    assert not pair.held["page", "device"]
    pair.compare()


def computed(pair: Pair, values: list[int], *, keep_tail: bool = True) -> Sequence:
    """Compute a prefix and stay at its end."""
    sequence = pair.match(b"a", values, 9)
    pair.extend(sequence, values[sequence.match.num_pages :], whole=True)
    if keep_tail and pair.index._needs_tail:
        pair.put_tail(sequence, len(values))
    return sequence


def test_split_while_loading_keeps_both_halves_with_their_transfer() -> None:
    """Otherwise half an edge stays 'loading' for ever, or is read before its bytes came."""
    pair = Pair(needs_tail=False)
    stored_chain(pair, CHAIN)
    first = pair.match(b"a", CHAIN, 9)
    pair.load(first, "load")
    second = pair.match(b"a", [0, 1, 1], 9)
    assert second.match.num_pages == 2
    assert second.match.arrivals == ["load"]
    pair.compare()
    pair.arrived("load")
    pair.compare()
    third = pair.match(b"a", CHAIN, 9)
    assert third.match.arrivals == []
    assert -1 not in third.match.pages


def test_split_while_storing_keeps_both_halves_from_eviction() -> None:
    """Otherwise a page is given away while the store still reads it."""
    pair = Pair(needs_tail=False)
    pair.release(computed(pair, CHAIN))
    sequence = pair.match(b"a", CHAIN, 9)
    pair.store(sequence, "store")
    pair.release(sequence)
    pair.release(pair.match(b"a", [0, 1, 1], 9))
    assert pair.evict("device", 9) == 0
    pair.arrived("store")
    assert pair.evict("device", 9, can_drop=False) == 4
    pair.compare()


def test_pinned_pages_are_not_evicted() -> None:
    """Otherwise a running sequence reads rows of another."""
    pair = Pair(needs_tail=False)
    pair.release(computed(pair, CHAIN))
    reader = pair.match(b"a", CHAIN, 3)
    assert pair.evict("device", 9) == 1
    assert pair.evict("device", 9) == 0
    pair.store(reader, "store")
    pair.arrived("store")
    assert pair.evict("device", 9, can_drop=False) == 0
    assert pair.evict("host", 9) == 0
    pair.release(reader)
    assert pair.evict("host", 9) == pair.evict("device", 9) == 3


def test_edges_in_flight_are_not_joined() -> None:
    """Otherwise the end of one transfer marks pages that another is still filling."""
    pair = Pair(needs_tail=False)
    pair.release(computed(pair, CHAIN))
    upper = pair.match(b"a", CHAIN, 2)
    pair.store(upper, "first store")
    whole = pair.match(b"a", CHAIN, 9)
    pair.store(whole, "second store")
    pair.release(upper)
    pair.release(whole)
    pair.compare()
    pair.arrived("second store")
    assert pair.evict("device", 9) == 2
    pair.arrived("first store")
    pair.compare()


def test_page_on_its_way_to_the_host_alone_is_not_matched() -> None:
    """Otherwise a load copies bytes that a fetch from storage has not written yet."""
    pair = Pair(needs_tail=False)
    stored_chain(pair, CHAIN)
    reader = pair.match(b"a", CHAIN, 9)
    pair.load(reader, "load")
    pair.lost("load", drop_host=True)
    pages = pair.give("page", "host", 4)
    pair.index.attach_host([reader.cursor.node], pages, "fetch")
    assert pair.index.match(b"a", tokens_of(CHAIN), 9).num_pages == 0
    pair.index.arrived("fetch")
    assert pair.index.match(b"a", tokens_of(CHAIN), 9).host_pages == 4


def test_new_pages_of_an_old_request_are_as_old_as_it() -> None:
    """Otherwise pages are ranked by a request that never asked for them."""
    pair = Pair(needs_tail=False)
    old = computed(pair, CHAIN)
    pair.release(pair.match(b"a", CHAIN, 9))
    pair.extend(old, [1], whole=True)
    pair.compare()


def test_second_request_shares_the_load() -> None:
    """Otherwise one prefix is loaded once for each of its readers."""
    pair = Pair()
    stored_chain(pair, CHAIN)
    first = pair.match(b"a", CHAIN, 9)
    assert first.match.host_pages == 4
    pair.load(first, "load")
    second = pair.match(b"a", CHAIN, 9)
    assert second.match.to_load == []
    assert second.match.arrivals == ["load"]
    assert second.match.pages == first.match.pages


def test_two_plans_for_one_load_give_the_second_ones_pages_back() -> None:
    """Otherwise the pages reserved by the slower of two planners leak."""
    pair = Pair()
    stored_chain(pair, CHAIN)
    first, second = pair.match(b"a", CHAIN, 9), pair.match(b"a", CHAIN, 9)
    pair.load(first, "load one")
    pair.load(second, "load two")
    assert second.match.arrivals == ["load one"]
    pair.compare()


def test_match_split_by_another_before_its_load_is_attached() -> None:
    """Otherwise only the half of the edge that the match still names is loaded."""
    pair = Pair()
    stored_chain(pair, CHAIN)
    stored_chain(pair, [0, 1])
    first = pair.match(b"a", CHAIN, 9)
    pair.match(b"a", [0, 1, 0], 9)
    pair.load(first, "load")
    assert -1 not in first.match.pages
    pair.compare()


@pytest.mark.parametrize("drop_host", [False, True])
def test_lost_load_with_pinned_readers(drop_host: bool) -> None:
    """Otherwise garbage stays visible, or the readers' pin keeps a failed page for ever."""
    pair = Pair(needs_tail=False)
    stored_chain(pair, CHAIN)
    readers = [pair.match(b"a", CHAIN, 9) for _ in range(2)]
    pair.load(readers[0], "load")
    pair.lost("load", drop_host=drop_host)
    assert list(pair.index.path_pages(readers[0].cursor)) == [-1] * 4
    later = pair.match(b"a", CHAIN, 9)
    assert later.match.num_pages == (0 if drop_host else 4)
    for sequence in [*readers, later]:
        pair.release(sequence)
        pair.compare()


def test_reader_of_a_lost_load_rewinds_and_refills() -> None:
    """Otherwise a recomputed span can never be cached again while its readers live."""
    pair = Pair(needs_tail=False)
    stored_chain(pair, CHAIN)
    reader = pair.match(b"a", CHAIN, 9)
    pair.load(reader, "load")
    pair.lost("load", drop_host=True)
    pair.rewind(reader, 0)
    pair.extend(reader, CHAIN, whole=True)
    assert -1 not in pair.index.path_pages(reader.cursor)
    pair.compare()


def test_hole_in_a_host_chain() -> None:
    """K039: a gap was counted as loadable, and freeing an inner edge orphaned its children."""
    pair = Pair(needs_tail=False)
    # Branches keep the four pages four edges.
    for depth in range(1, 4):
        stored_chain(pair, [*CHAIN[:depth], (CHAIN[depth] + 1) % 3])
    stored_chain(pair, CHAIN)
    upper = pair.match(b"a", CHAIN, 2)
    assert [node.end for node in upper.match.to_load] == [1, 2]
    second = upper.match.to_load[1]
    pages = pair.give("page", "device", 1)
    pair.index.attach_device([second], pages, "bad load")
    pair.twin.pages[b"a", 0, tokens_of(CHAIN[:2])].device.name = pages[0]
    pair.twin.pages[b"a", 0, tokens_of(CHAIN[:2])].device.arrival = "bad load"
    pair.release(upper)
    pair.lost("bad load", drop_host=True)
    pair.compare()
    hit = pair.match(b"a", CHAIN, 9)
    assert hit.match.num_pages == 1
    pair.extend(hit, CHAIN[1:2], whole=True)
    pair.release(hit)
    assert pair.match(b"a", CHAIN, 9).match.num_pages == 4
    pair.compare()


def test_cut_back_to_the_deepest_tail() -> None:
    """Otherwise computing resumes where no window exists, and the answer is wrong."""
    pair = Pair()
    sequence = computed(pair, CHAIN, keep_tail=False)
    pair.put_tail(sequence, 2)
    pair.release(sequence)
    match = pair.match(b"a", CHAIN, 9).match
    assert (match.num_pages, match.matched_pages) == (2, 4)
    assert match.cursor.num_pages == 2
    assert match.tail is not None
    pair.evict_tails("device", 1)
    match = pair.match(b"a", CHAIN, 9).match
    assert (match.num_pages, match.matched_pages, match.tail) == (0, 4, None)


def test_tail_still_being_loaded_is_used_from_the_host() -> None:
    """Otherwise a resume point vanishes from the index while its load is under way."""
    pair = Pair()
    stored_chain(pair, CHAIN)
    pair.evict_tails("device", 1)
    first = pair.match(b"a", CHAIN, 9)
    assert first.match.tail is not None
    assert first.twin_match.tail is not None
    pair.load(first, "load")
    pair.load_tail(first.match.tail, first.twin_match.tail, "device", "load")
    assert pair.match(b"a", CHAIN, 9).match.num_pages == 4
    pair.lost("load", drop_host=False)
    assert pair.match(b"a", CHAIN, 9).match.num_pages == 4
    pair.compare()


def test_tail_object_survives_splits_and_joins() -> None:
    """Otherwise a restore reads the slot of another boundary."""
    pair = Pair()
    sequence = computed(pair, CHAIN)
    pair.release(sequence)
    tail = pair.match(b"a", CHAIN, 9).match.tail
    other = computed(pair, [0, 1, 1])
    assert tail is not None
    assert tail.node is not None
    assert tail.node.start + tail.offset == 4
    pair.release(other)
    pair.compare()


def test_duplicates_stay_with_their_owner() -> None:
    """Otherwise two sequences that computed one prefix free each other's pages, or leak them."""
    pair = Pair(needs_tail=False)
    one, two = pair.match(b"a", CHAIN, 9), pair.match(b"a", CHAIN, 9)
    pair.extend(one, CHAIN, whole=True)
    extended = pair.index.extend(two.cursor, tokens_of(CHAIN), array("i", [90, 91, 92, 93]))
    assert list(extended.not_taken) == [90, 91, 92, 93]
    assert two.cursor.node is one.cursor.node


def test_replaced_tail_returns_the_old_slot_unless_it_is_read() -> None:
    """Otherwise a slot leaks at each turn, or is overwritten under a store."""
    pair = Pair()
    sequence = computed(pair, CHAIN)
    old = pair.index.put_tail(sequence.cursor, 4, 70)
    assert old.unused is not None
    assert old.tail is not None
    pair.index.pin_tail(old.tail)
    assert pair.index.put_tail(sequence.cursor, 4, 71).unused == 71
    with pytest.raises(UsageError):
        pair.index.drop_tail(old.tail)
    pair.index.unpin_tail(old.tail)
    assert pair.index.put_tail(sequence.cursor, 4, 72).unused == 70
    assert pair.index.drop_tail(old.tail).device_tails == [72]
    pair.index.check()


def test_page_of_a_pinned_tail_is_not_evicted() -> None:
    """Otherwise a tail is stored to the host after its slot was given to another sequence."""
    pair = Pair()
    pair.release(computed(pair, CHAIN))
    tail, twin = pair.tails()[0]
    pair.index.pin_tail(tail)
    twin.pins += 1
    assert pair.evict("device", 4) == 0
    twin.pins -= 1
    pair.index.unpin_tail(tail)
    assert pair.evict("device", 4) == 4
    pair.compare()


def test_flush_with_pinned_readers() -> None:
    """Otherwise rows of old weights are served to new requests, or a reader's pages are freed."""
    pair = Pair()
    reader = computed(pair, CHAIN)
    pair.release(computed(pair, [0, 1, 1]))
    pair.clear(None)
    assert pair.match(b"a", CHAIN, 9).match.num_pages == 0
    assert list(pair.index.path_pages(reader.cursor)).count(-1) == 0
    assert not reader.cursor.is_live
    pair.extend(reader, [1], whole=True)
    assert reader.cursor.num_pages == 4
    pair.release(reader)
    pair.compare()
    assert not pair.held["page", "device"]


def test_flush_during_a_load_waits_for_it() -> None:
    """Otherwise the transfer writes into pages that have a new owner."""
    pair = Pair()
    stored_chain(pair, CHAIN)
    reader = pair.match(b"a", CHAIN, 9)
    pair.load(reader, "load")
    pair.release(reader)
    pair.clear(b"a")
    assert len(pair.held["page", "device"]) == 4
    pair.arrived("load")
    assert not pair.held["page", "device"]


def test_identities_share_nothing() -> None:
    """Otherwise a tenant reads another's prefix."""
    pair = Pair(needs_tail=False)
    pair.release(computed(pair, CHAIN))
    assert pair.match(b"b", CHAIN, 9).match.num_pages == 0


def test_limit_keeps_the_last_token_to_compute() -> None:
    """Otherwise a full hit leaves nothing to compute, and no first token."""
    pair = Pair(needs_tail=False)
    pair.release(computed(pair, CHAIN))
    match = pair.match(b"a", CHAIN, 3).match
    assert (match.num_pages, match.matched_pages) == (3, 3)


def test_misuse_is_refused_and_changes_nothing() -> None:
    """Otherwise a slip in the scheduler corrupts the accounts instead of raising."""
    index = PrefixIndex(PAGE_BYTES, needs_tail=False)
    cursor = index.match(b"a", b"", 0).cursor
    page = array("i", [0])
    with pytest.raises(UsageError):
        index.extend(cursor, b"1234", page)
    with pytest.raises(UsageError):
        index.put_tail(cursor, 1, 0)
    with pytest.raises(UsageError):
        index.rewind(cursor, 1)
    index.extend(cursor, tokens_of([0]), page)
    with pytest.raises(UsageError):
        index.attach_device([cursor.node], page, None)
    with pytest.raises(UsageError):
        index.attach_host([cursor.node], array("i", [0, 1]), None)
    node = cursor.node
    index.release(cursor)
    with pytest.raises(UsageError):
        index.release(cursor)
    index.evict_device(1)
    with pytest.raises(UsageError):
        index.attach_host([node], page, None)
    with pytest.raises(UsageError):
        PrefixIndex(6, needs_tail=False)
    index.check()


def test_check_notices_a_wrong_count() -> None:
    """Otherwise the other tests prove nothing."""
    index = PrefixIndex(PAGE_BYTES, needs_tail=False)
    cursor = index.match(b"a", b"", 0).cursor
    index.extend(cursor, tokens_of([0]), array("i", [5]))
    index.tree.counts["device"].total += 1
    with pytest.raises(LedgerImbalance):
        index.check()


def test_released_moves() -> None:
    """Otherwise collecting releases frees a page twice."""
    one, two = Released(array("i", [1])), Released(array("i", [2]), host_tails=[3])
    one.take(two)
    assert (list(one.device_pages), one.host_tails, bool(two)) == ([1, 2], [3], False)
