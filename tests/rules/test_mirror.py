"""The guards that the worlds step are the product's: each is held against the code it mirrors."""

from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import product

import pytest
import trio
import trio.testing
from attrs import define

from kvlease.errors import NotReady, PagesUnavailable, StaleEpoch, TransferFailed
from kvlease.pools.page_book import PageBook
from kvlease.pools.prefix_node import Home, Node, evictable_pages
from kvlease.protocols.grants import GrantBook, WriteGrant
from kvlease.protocols.ports import CompletionState
from kvlease.protocols.readiness import Readiness
from kvlease.runtime.streams import InlineStream
from kvlease.runtime.transfer import Transfer
from kvlease.units import Epoch, LayerId, LeaseId, PageId
from tests.rules.explore import World
from tests.rules.guards import Guards
from tests.rules.rulebook import NBYTES, Label, Rulebook
from tests.rules.state import COPY_STATES, NONE, PLANNED_OUT, Size, State
from tests.rules.transfers import pool_steps, transfer_steps
from tests.runtime.rig import order, plan

LAYER = LayerId(0)
COMPONENTS = ((0, "latent"), (0, "index_k"), (1, "latent"))
GUARDS = Guards()
EVERY_STATE = pytest.mark.parametrize("state", list(CompletionState), ids=lambda s: s.value)


@define(eq=False)
class Work:
    """Something that may still touch pages."""

    id: int = 1
    kind: str = "load"
    is_settled: bool = False


@pytest.mark.parametrize("waiting", [0, 1, 2])
def test_pages_leave_quarantine_as_the_book_says(waiting: int) -> None:
    book, ended = PageBook("pages", 1), Work()
    book.release(book.acquire(1), [ended, *(Work() for _ in range(waiting))])
    assert GUARDS.bumps_epoch == (book.epochs[0] == 1)
    ended.is_settled = True
    book.reclaim()
    assert GUARDS.may_reclaim((1 << waiting) - 1) == (book.available == 1)


@pytest.mark.parametrize(("free", "reserved"), [(f, r) for f in range(3) for r in range(f + 1)])
def test_pages_are_promised_as_the_book_says(free: int, reserved: int) -> None:
    book = PageBook("pages", free)
    book.reserve(reserved)
    if GUARDS.may_promise(free, reserved):
        book.reserve(1)
    else:
        with pytest.raises(PagesUnavailable):
            book.reserve(1)


@pytest.mark.parametrize(
    ("pins", "loading", "storing"), list(product([0, 1], [False, True], [False, True]))
)
def test_pages_are_evicted_as_the_index_says(pins: int, loading: bool, storing: bool) -> None:
    node = Node(b"", 1, 0, Home(b""))
    node.pins = pins
    node.device.pages = node.host.pages = array("i", [0])
    node.device.arrival = object() if loading else None
    node.host.arrival = object() if storing else None
    may = GUARDS.may_evict(pins > 0, loading or storing)
    assert (evictable_pages(node, "device") > 0, evictable_pages(node, "host") > 0) == (may, may)


def transfer_in(state: CompletionState) -> Transfer:
    """A transfer of one layer of one component, where the state says."""
    transfer = Transfer(plan(order(0, "latent", NBYTES)))
    if state in (CompletionState.RECORDED, CompletionState.DONE):
        transfer.record_layers([0])
    match state:
        case CompletionState.DONE:
            assert transfer.begin_copy(0)
            transfer.end_copy(0, NBYTES)
        case CompletionState.FAILED:
            transfer.fail("failed")
        case CompletionState.REVOKED:
            transfer.revoke()
        case _:
            pass
    assert transfer.layer_completion(LAYER).state is state
    return transfer


async def ends_well(wait: Callable[[], Awaitable[None]]) -> bool:
    """Whether a wait ends well by itself."""
    with trio.move_on_after(1), suppress(TransferFailed):
        await wait()
        return True
    return False


@EVERY_STATE
async def test_layers_open_as_the_gate_says(
    state: CompletionState, autojump_clock: trio.testing.MockClock
) -> None:
    readiness = Readiness(1, [(LeaseId(1), transfer_in(state))])
    stream = InlineStream()
    assert await ends_well(partial(readiness.settle, LAYER, stream)) == GUARDS.may_open(state)


@EVERY_STATE
def test_streams_go_on_as_the_completion_says(state: CompletionState) -> None:
    stream = InlineStream()
    completion = transfer_in(state).layer_completion(LAYER)
    if state is CompletionState.PLANNED:
        with pytest.raises(NotReady):
            stream.wait(completion)
        return
    stream.wait(completion)
    assert stream.record().state.is_final == GUARDS.may_run(state)


@EVERY_STATE
async def test_steps_publish_and_seal_as_verifying_says(
    state: CompletionState, autojump_clock: trio.testing.MockClock
) -> None:
    readiness = Readiness(1)
    readiness.bound.append(transfer_in(state).layer_completion(LAYER))
    may = await ends_well(readiness.verify)
    assert may == GUARDS.may_publish(state) == GUARDS.may_seal(state)


@pytest.mark.parametrize(
    ("is_open", "same_incarnation", "same_epochs"), list(product([True, False], repeat=3))
)
def test_writes_are_let_in_as_the_grant_book_says(
    is_open: bool, same_incarnation: bool, same_epochs: bool
) -> None:
    back: list[WriteGrant] = []
    book = GrantBook(back.append)
    grant = WriteGrant(LeaseId(1), (PageId(3),), (Epoch(7),), "peer", 2, "region", 10.0)
    book.issue(grant)
    if not is_open:
        book.expire(10.0)
    assert GUARDS.grant_held_until_stopped == (not back)
    epochs = [Epoch(7 if same_epochs else 6)]
    if GUARDS.accepts(is_open, same_incarnation, same_epochs):
        assert book.accept(grant.id, 2 if same_incarnation else 1, epochs) is grant
    else:
        with pytest.raises(StaleEpoch):
            book.accept(grant.id, 2 if same_incarnation else 1, epochs)
    assert book.connection_ended("peer", 2) == len(back) == int(GUARDS.connection_end_stops)


# -- the life of a transfer, in step ---------------------------------------------------------------


ONE_LOAD = Size("one load", cached=1, transfers=1, loads=True)
Way = tuple[Label, ...]


def follow(way: Way) -> Transfer:
    """Take a real transfer of the worlds' shape the same way."""
    transfer = Transfer(plan(*(order(layer, name, NBYTES) for layer, name in COMPONENTS)))
    for action, *numbers in way:
        index = int(numbers[-1])
        match action:
            case "transfer records layer":
                transfer.record_layers([index])
            case "copy begins":
                assert transfer.begin_copy(index)
            case "copy returns":
                transfer.end_copy(index, NBYTES)
            case "copy returns short":
                transfer.end_copy(index, NBYTES - 1)
            case "transfer is late or revoked":
                assert transfer.revoke()
            case _:
                assert action in ("transfer's loader dies", "transfer's end is told"), action
    return transfer


def compare(rules: Rulebook, state: State, way: Way) -> None:
    """What the world says of its transfer is what the real one says of itself."""
    mine, real = state.transfers[0], follow(way)
    assert mine is not None
    *layers, whole = rules.layers(mine.copies)
    assert COPY_STATES[whole] is real.state, way
    if mine.stage == PLANNED_OUT:
        assert [COPY_STATES[layer] for layer in layers] == [
            real.layer_completion(LayerId(layer)).state for layer in range(len(layers))
        ], way
    assert rules.settles[whole, mine.running != NONE] == real.is_settled, way
    if mine.running == NONE and not rules.begins[whole]:
        assert not any(real.begin_copy(index) for index in range(len(COMPONENTS))), way


def test_a_real_transfer_goes_every_way_that_the_worlds_go() -> None:
    world = World(ONE_LOAD)
    rules, first = world.rules, world.start()
    planned = next(
        after for label, _, after in pool_steps(rules, ONE_LOAD, first) if len(label) > 2
    )
    ways: dict[State, Way] = {planned: ()}
    todo = [planned]
    while todo:
        state = todo.pop()
        for label, _, after in transfer_steps(rules, ONE_LOAD, state, 0):
            way = (*ways[state], label)
            if label[0] == "transfer settles":
                assert follow(ways[state]).is_settled, way
                continue
            compare(rules, after, way)
            if after not in ways:
                ways[after] = way
                todo.append(after)
    assert len(ways) > 50
