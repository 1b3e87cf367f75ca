"""C05: a transfer was given up while some of its writes were still in the air."""

import threading

import pytest

from kvlease.errors import StaleEpoch, TransferFailed
from kvlease.pools.page_book import PageBook
from kvlease.protocols.grants import GrantBook, WriteGrant
from kvlease.protocols.ports import CompletionState, CopyOrder
from kvlease.runtime.transfer import Transfer
from kvlease.units import Epoch, LeaseId, PageId
from tests.museum.rig import MLA, PAGE, SCHEMAS, Bench, tokens_of
from tests.runtime.rig import PATIENCE_S, Held, Witness, grid, plan

PROMPT = tokens_of(1, 6 * PAGE)


class Doors:
    """A copier whose copies stand, each at a door of its own, and then do what they are told."""

    def __init__(self, *orders: CopyOrder) -> None:
        self.entered = {(o.layer, o.component): threading.Event() for o in orders}
        self.go = {(o.layer, o.component): threading.Event() for o in orders}

    def copy(self, order: CopyOrder) -> int:
        key = order.layer, order.component
        self.entered[key].set()
        assert self.go[key].wait(PATIENCE_S)
        if key == (0, "latent"):
            raise OSError("the first handle failed")
        return order.run()


@pytest.mark.parametrize("last", [1, 2])
def test_the_first_error_of_several_writes_frees_nothing(last: int) -> None:
    """K055 vllm#56104 (F06): one handle's error invalidated the blocks under its siblings.

    Three copies into one set of pages run at once. The first fails: the request hears of it once,
    and the pages stay away until the other two have returned, in either order.
    """
    bench = Bench(MLA, device_pages=6)
    bench.cache_on_host(PROMPT)
    held = bench.start(PROMPT)
    planned = held.load
    assert planned is not None
    transfer, orders = bench.carry(planned), planned.copies[:3]
    doors = Doors(*orders)
    threads = [threading.Thread(target=transfer.run_copy, args=(i, doors)) for i in range(3)]
    for thread in threads:
        thread.start()
    keys = [*doors.go]
    assert all(door.wait(PATIENCE_S) for door in doors.entered.values())
    doors.go[keys[0]].set()
    threads[0].join()
    assert transfer.state is CompletionState.FAILED
    assert not transfer.fail("again"), "it has failed once already"
    bench.pool.lost(planned, "failed", ())
    bench.close(held)
    for index in (3 - last, last):
        assert not transfer.is_settled
        assert bench.begin(tokens_of(2, 6 * PAGE)) is None
        doors.go[keys[index]].set()
        threads[index].join()
    assert transfer.is_settled
    bench.pool.transfers.settled(planned)
    other = bench.start(tokens_of(2, 6 * PAGE))
    bench.compute(other, tokens_of(2, 6 * PAGE))
    assert not [*bench.wrong(other, tokens_of(2, 6 * PAGE), 6)]


@pytest.mark.parametrize("end", ["fail", "revoke"])
@pytest.mark.parametrize("when", ["before", "during", "between", "after"])
def test_a_transfer_ends_exactly_once(when: str, end: str) -> None:
    """K059 TensorRT-LLM#13713 (F14): promises were dropped unkept, or kept twice."""
    witness, held = Witness(), Held()
    transfer = Transfer(plan(*grid(2, "latent"), holds=(held,)), observer=witness)

    ran: list[int] = []

    class Ending:
        def copy(self, order: CopyOrder) -> int:
            ran.append(order.layer)
            if when == "during":
                getattr(transfer, end)("given up")
            return order.run()

    if when == "before":
        getattr(transfer, end)("given up")
    transfer.run_copy(0, Ending())
    if when == "between":
        getattr(transfer, end)("given up")
    transfer.run_copy(1, Ending())
    getattr(transfer, end)("given up")
    assert ran == {"before": [], "during": [0], "between": [0], "after": [0, 1]}[when]
    transfer.revoke()
    transfer.release()
    transfer.release()
    names = witness.names()
    assert names.count("done") + names.count("failed") == 1
    assert names.count("settled") == 1
    assert held.closed == 1
    if when == "after":
        transfer.raise_if_failed()
    else:
        with pytest.raises(TransferFailed, match="given up"):
            transfer.raise_if_failed()


@pytest.mark.parametrize("name", ["v4", "mla with indexer"])
def test_a_request_that_returns_finds_its_store_and_makes_no_second(name: str) -> None:
    """K061 vllm#46014: an assertion fell when a preempted request came back, a store pending."""
    bench = Bench(SCHEMAS[name])
    held = bench.start(PROMPT)
    bench.compute(held, PROMPT)
    store = bench.plan_store(held)
    assert store is not None
    bench.close(held)
    again = bench.start(PROMPT)
    assert again.lease.sealed == 6
    assert bench.plan_store(again) is None
    if again.load is not None:
        bench.bring(again.load)
    bench.bring(store)
    bench.close(again)
    bench.drop_device()
    assert bench.pool.index.statistics().host_pages == 6
    for page, where in enumerate(store.destination):
        assert not [*bench.wrong_rows(where, PROMPT, page, "host")]
    bench.check()


class Writer:
    """A remote writer as a blocker of pages, until its grant is over."""

    kind = "grant"
    id = 1
    is_settled = False


@pytest.mark.parametrize("end", ["acknowledged", "connection ended"])
def test_an_expired_grant_refuses_its_writer_and_frees_nothing(end: str) -> None:
    """K047 vllm-omni#6264 (F06): a reaper took memory back with a remote operation in flight.

    The grant runs out while its writer writes. A write begun later is refused; the pages are not
    handed out again before the writer is known to have stopped.
    """
    book, writer = PageBook("pages", 4), Writer()
    pages = book.acquire(4)

    def stopped(_grant: WriteGrant) -> None:
        writer.is_settled = True

    grants = GrantBook(stopped)
    grant = WriteGrant(
        LeaseId(1),
        tuple(PageId(page) for page in pages),
        tuple(Epoch(book.epochs[page]) for page in pages),
        "decode",
        incarnation=3,
        region="r",
        expires_at_s=0.01,
    )
    grants.issue(grant)
    assert grants.accept(LeaseId(1), 3, grant.epochs) is grant
    assert grants.expire(0.1) == [grant]
    book.release(pages, [writer])
    with pytest.raises(StaleEpoch):
        grants.accept(LeaseId(1), 3, grant.epochs)
    assert book.reclaim() == 0
    assert grants.expire(100.0) == []
    assert book.reclaim() == 0
    if end == "acknowledged":
        grants.stopped(LeaseId(1))
    else:
        assert grants.connection_ended("decode", 2) == 0
        assert book.reclaim() == 0
        assert grants.connection_ended("decode", 3) == 1
    assert book.reclaim() == 4
