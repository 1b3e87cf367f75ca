"""C06: one part of a prefix was forgotten, and the rest was used without it."""

import attrs
import pytest

from kvlease.errors import TransferFailed
from kvlease.protocols.ports import CompletionState, CopyOrder
from kvlease.protocols.schema import Schema
from kvlease.units import LayerId
from tests.museum.rig import MLA, PAGE, SCHEMAS, Bench, own_bytes, tokens_of, v4_schema
from tests.pools.prefix_pair import Pair
from tests.pools.prefix_pair import tokens_of as index_tokens
from tests.pools.test_prefix_hazards import CHAIN, stored_chain

PROMPT = tokens_of(1, 6 * PAGE)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_component_survives_the_way_to_the_host_and_back(name: str) -> None:
    """K067 sglang#38031 (F07): after device, host, device the index keys were those of nobody.

    Six pages go round, into other physical pages; each byte of each component is its prefix's own.
    """
    bench = Bench(SCHEMAS[name])
    bench.cache_on_host(PROMPT)
    assert bench.hit(PROMPT) == (0, 6)
    squatter = bench.start(tokens_of(2, 3 * PAGE))
    bench.compute(squatter, tokens_of(2, 3 * PAGE))
    held = bench.start(PROMPT)
    bench.bring(held.load)
    assert not [*bench.wrong(held, PROMPT, 6)]
    assert not [*bench.wrong(squatter, tokens_of(2, 3 * PAGE), 3)]
    bench.check()


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]])
@pytest.mark.parametrize("index_k", ["bf16", "fp8"])
def test_index_keys_follow_their_pages_however_these_lie(index_k: str, order: list[int]) -> None:
    """K069 sglang#39893: compressed index keys outside of the main pool went to stale places.

    Free pages are handed out shuffled, so that logical and physical order differ at both ends.
    """
    bench = Bench(SCHEMAS[f"v4 {index_k} index keys"], device_pages=12)
    seats = [bench.start(tokens_of(seed, PAGE)) for seed in range(10, 16)]
    for held in seats:
        bench.compute(held, tokens_of(10 + seats.index(held), PAGE), tails=False)
    for number in order:
        bench.close(seats[number])
    bench.pool.memory.take_back(bench.pool.index.clear())
    bench.cache_on_host(PROMPT)
    held = bench.start(PROMPT)
    bench.bring(held.load)
    assert not [*bench.wrong(held, PROMPT, 6)]


def test_an_entry_of_another_format_is_a_miss() -> None:
    """K069 sglang#39893: entries written before a component existed were hit, and lacked it."""
    layers = [attrs.evolve(layer, spans=layer.spans[:1]) for layer in MLA.layers]
    without = Schema(MLA.family, MLA.page_tokens, tuple(layers))
    assert without.digest != MLA.digest
    digests = {schema.digest for schema in SCHEMAS.values()}
    assert len(digests) == len(SCHEMAS)


def test_the_set_of_components_is_sealed_before_the_first_page() -> None:
    """K089 bytedance-iaas/sglang#705: a pool registered after the cache was built was not restored.

    A schema cannot be changed; another one has another digest, and so another prefix tree.
    """
    more = attrs.evolve(MLA.layers[0], id=LayerId(4))
    assert Schema(MLA.family, MLA.page_tokens, (*MLA.layers, more)).digest != MLA.digest
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        more.spans = ()  # type: ignore[misc]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        MLA.layers = ()  # type: ignore[misc]


@pytest.mark.parametrize("host_tails", [0, 1])
def test_spans_without_their_tail_are_no_hit(host_tails: int) -> None:
    """K085 LMCache#2879 (F07): hits were reported although the recurrent state was not stored."""
    bench = Bench(host_tails=host_tails)
    bench.cache(PROMPT)
    bench.bring(bench.store(PROMPT))
    bench.drop_device()
    counts = bench.pool.index.statistics()
    assert (counts.host_pages, counts.host_tails) == (6, host_tails)
    usable = sum(bench.hit(PROMPT))
    assert (usable > 0) == (host_tails > 0)
    bench.check()


def test_a_page_that_went_between_the_question_and_the_load_is_not_loaded() -> None:
    """K079 sglang#31108: all pages existed when asked; one was gone when its bytes were fetched.

    Another load finds the host copy of the lower pages bad in between. What remains missing stays
    missing in the match, and the pages meant for it come back.
    """
    pair = Pair(needs_tail=False)
    stored_chain(pair, CHAIN)
    asked = pair.match(b"a", CHAIN, 9)
    upper = pair.match(b"a", CHAIN, 2)
    assert asked.match.host_pages == 4
    nodes = [asked.match.cursor.node]
    pages = pair.give("page", "device", 2)
    pair.index.attach_device(nodes, pages, "bad load")
    pair.release(upper)
    for depth in (3, 4):
        page = pair.twin.pages[b"a", 0, index_tokens(CHAIN[:depth])]
        page.device.name, page.device.arrival = pages[depth - 3], "bad load"
    pair.lost("bad load", drop_host=True)
    pair.load(asked, "load")
    assert list(asked.match.pages).count(-1) == 2
    pair.compare()


def test_a_window_of_another_request_is_never_resumed_from() -> None:
    """K081 ROCm/ATOM#1423: the window lay in a per-request ring; a hit read what was left there.

    A fills slot 0 and is hit after C has used that slot: only from a kept tail, with A's own rows.
    """
    bench = Bench(slots=1)
    short = tokens_of(1, 3 * PAGE)
    bench.cache(short, tails=False)
    assert bench.hit(short) == (0, 0), "no state at the boundary is no hit"
    bench.pool.flush()
    bench.cache(short)
    bench.cache(tokens_of(9, 4 * PAGE))
    held = bench.start(short)
    assert held.lease.slot == 0
    assert held.load is not None
    bench.bring(held.load)
    assert not [*bench.wrong(held, short, 3)]


@pytest.mark.parametrize("window", [8, 16, 24, 40, 52])
def test_a_ring_is_kept_with_its_geometry(window: int) -> None:
    """K087 llama.cpp#25297: a window ring saved past its first turn came back rotated."""
    bench = Bench(v4_schema(window), host_pages=16, host_tails=16, device_tails=16)
    num_pages = max(3, 3 * window // PAGE)
    prompt = tokens_of(3, num_pages * PAGE)
    bench.cache_on_host(prompt)
    for boundary in range(1, num_pages + 1):
        held = bench.start(prompt, boundary)
        assert len(held.lease.pages) == num_pages or boundary < num_pages
        bench.bring(held.load)
        assert not [*bench.wrong(held, prompt, boundary)], boundary
        bench.close(held)


@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_components_are_found_by_name_not_by_number(boundary: int) -> None:
    """K127 vllm#42792: state number 1 was taken for the recurrent one."""
    schema = v4_schema()
    layers = [
        attrs.evolve(layer, spans=layer.spans[::-1], tails=layer.tails[::-1])
        for layer in schema.layers
    ]
    bench = Bench(Schema(schema.family, PAGE, tuple(layers)))
    prompt = tokens_of(4, 3 * PAGE)
    bench.cache_on_host(prompt)
    held = bench.start(prompt, boundary)
    bench.bring(held.load)
    assert not [*bench.wrong(held, prompt, boundary)]


@pytest.mark.parametrize("fault", ["raises", "short", "long"])
@pytest.mark.parametrize("schema", ["v4", "mla with indexer"])
def test_one_bad_component_makes_the_whole_span_unusable(schema: str, fault: str) -> None:
    """K099 vllm#47812 (F08): only the failing group's page was marked, its peers stayed trusted.

    Each component of each layer fails in turn; nothing of the span may be hit afterwards.
    """
    bench = Bench(SCHEMAS[schema])
    bench.cache_on_host(PROMPT)
    held = bench.start(PROMPT)
    assert held.load is not None
    count = len(held.load.copies)
    bench.lose(held.load, "late")
    bench.close(held)
    for index in range(count):
        held = bench.start(PROMPT)
        assert held.load is not None
        transfer = bench.carry(held.load)
        bench.run_all(transfer, skip=range(index, count))
        transfer.run_copy(index, _Faulty(fault))
        bench.run_all(transfer)
        assert transfer.state is CompletionState.FAILED
        with pytest.raises(TransferFailed):
            transfer.raise_if_failed()
        bench.pool.lost(held.load, "failed", ())
        bench.pool.transfers.settled(held.load)
        assert bench.hit(PROMPT) == (0, 0)
        bench.close(held)
        bench.check()
        bench.cache_on_host(PROMPT)


class _Faulty:
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def copy(self, order: CopyOrder) -> int:
        if self.fault == "raises":
            raise OSError("the link is down")
        return order.nbytes - 1 if self.fault == "short" else order.nbytes + 1


def test_the_bench_tells_own_bytes_from_foreign_ones() -> None:
    """Otherwise the other tests prove nothing."""
    bench = Bench()
    held = bench.start(PROMPT)
    bench.compute(held, PROMPT)
    assert not [*bench.wrong(held, PROMPT, 6)]
    rows = bench.pool.memory.spans.rows(bench.schema.layers[1].id, "index_k")
    rows[held.lease.pages[2]][1] = rows[held.lease.pages[3]][1]
    assert len([*bench.wrong(held, PROMPT, 6)]) == 1
    ring = bench.pool.memory.rings.ring(bench.schema.layers[0].id, "window")[held.lease.slot]
    ring[5] = own_bytes(0, "window", b"foreign", ring[5])
    assert len([*bench.wrong(held, PROMPT, 6)]) == 2
