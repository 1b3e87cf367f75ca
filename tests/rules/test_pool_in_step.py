"""The real pool walks beside a world: the same things happen to both, and both count the same.

A world is a claim about the pools: who pins what, who blocks what, what goes when. Random walks
through a world are repeated with the real pool, its index, its page books and its leases.
"""

import random

import pytest
from attrs import define, field

from kvlease.pools.held import PlannedTransfer
from kvlease.pools.memory import PoolSizes
from kvlease.pools.prefix_node import Released
from kvlease.pools.unified import UnifiedPool
from kvlease.protocols.geometries import gqa_schema
from kvlease.protocols.ownership import Lease, Shared
from kvlease.runtime.completions import CpuCompletion
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.transfer import Transfer
from tests.rules.explore import World
from tests.rules.rulebook import Label, Rulebook
from tests.rules.state import CLOSING, DONE, FAILED, PAGE_STATES, Size, State
from tests.runtime.rig import order, plan

ONE = Size(
    "one transfer at a time", device_pages=2, host_pages=1, cached=1, num_readers=2, transfers=1,
    loads=True, stores=True,
)  # fmt: skip
TWO = ONE._replace(name="two transfers at a time", transfers=2)
RARE = ("pool evicts", "transfer is late or revoked")
"""Chosen less often, or most walks would soon have nothing left to move."""
PAGE_TOKENS = 4
ROOT, TOKENS = b"root", bytes(4 * PAGE_TOKENS)
SCHEMA = gqa_schema(2, 1, 2, PAGE_TOKENS, "float32")
REASONS = {FAILED: "failed"}
Counts = tuple[int, ...]


@define
class RealPool:
    """A unified pool with one page of one prefix, on the host to begin with."""

    pool: UnifiedPool
    planned: dict[int, PlannedTransfer] = field(factory=dict)
    leases: dict[int, Lease[Shared]] = field(factory=dict)
    last_uses: dict[int, CpuCompletion] = field(factory=dict)

    @staticmethod
    def make() -> "RealPool":
        sizes = PoolSizes(ONE.device_pages, ONE.host_pages, 0, 0, slots=64)
        real = RealPool(UnifiedPool(SCHEMA, sizes, EventLog(level="off")))
        pool = real.pool
        held = pool.open(pool.match(ROOT, TOKENS, 0), 1, 1)
        assert held is not None
        assert pool.grow(held, 1, 1)
        pool.seal(held, TOKENS, 1, 1)
        store = pool.transfers.plan_store(held, 1)
        assert store is not None
        pool.close(held)
        pool.transfers.done(store)
        pool.transfers.settled(store)
        assert real.try_evict(is_device=True)
        return real

    def plan(self, slot: int, *, is_load: bool) -> None:
        """Plan a transfer for a sequence that leaves at once; the transfer goes on (R7)."""
        pool = self.pool
        held = pool.open(pool.match(ROOT, TOKENS, 1), 0, 1)
        assert held is not None
        planned = held.load if is_load else pool.transfers.plan_store(held, 1)
        assert planned is not None
        planned.carrier = Transfer(plan(order(0, "k"), order(1, "k")))
        pool.close(held)
        self.planned[slot] = planned

    def end(self, slot: int, whole: int) -> None:
        """Tell the pool how a transfer ended."""
        if whole == DONE:
            self.pool.transfers.done(self.planned[slot])
        else:
            self.pool.lost(self.planned[slot], REASONS.get(whole, "late"), ())

    def close(self, reader: int, *, has_reads: bool) -> None:
        """Close a reader's lease, with a last use if it has reads under way."""
        last_use = None
        if has_reads:
            last_use = self.last_uses[reader] = CpuCompletion("last use")
            last_use.set_recorded()
        self.leases.pop(reader).close(last_use)

    def see_off(self, reader: int) -> None:
        """The last read of a closed lease has run."""
        self.last_uses.pop(reader).finish()
        self.pool.reclaim()

    def try_evict(self, *, is_device: bool) -> Released:
        """Let one page of a tier go if one may."""
        index = self.pool.index
        released = index.evict_device(1, True) if is_device else index.evict_host(1)
        self.pool.memory.take_back(released)
        return released

    def counts(self) -> list[Counts]:
        """Pages by state, the device's and the host's, once all that may has left quarantine."""
        self.pool.reclaim()
        ledgers = self.pool.ledgers()
        return [
            (one.free, one.held, one.sealed, one.quarantined)
            for one in (ledgers["device pages"], ledgers["host pages"])
        ]


def counts_of(rules: Rulebook, state: State) -> list[Counts]:
    """The same of a world's state."""
    for place in range(ONE.num_pages):
        state = rules.reclaim(state, place) or state
    tiers = state.pages[: ONE.device_pages], state.pages[ONE.device_pages :]
    return [
        tuple(sum(page.state == code for page in pages) for code in range(len(PAGE_STATES)))
        for pages in tiers
    ]


def happens(real: RealPool, rules: Rulebook, before: State, label: Label, after: State) -> bool:
    """Do with the real pool what may happen in the world; False where the pool declines.

    It may spare a page that the world would evict: a reader of a lost page pins its path yet.
    """
    action, number = label[0], int(label[1])
    match action:
        case "plan load" | "plan store":
            real.plan(number, is_load=action == "plan load")
        case "transfer's end is told":
            transfer = before.transfers[number]
            assert transfer is not None
            real.end(number, rules.whole(transfer))
        case "transfer settles":
            real.pool.transfers.settled(real.planned.pop(number))
        case "reader leases":
            real.leases[number] = real.pool.lease_prefix(ROOT, TOKENS)
            assert real.leases[number].num_pages == 1
        case "reader publishes" | "reader starts over" | "reader is aborted":
            real.close(number, has_reads=after.readers[number].phase == CLOSING)
        case "reader is seen off":
            real.see_off(number)
        case "pool evicts":
            return bool(real.try_evict(is_device=number < ONE.device_pages))
        case _:
            pass  # what the pool does not hear of
    return True


def check_evictable(real: RealPool, steps: list[Label]) -> None:
    """What the world would not evict the pool does not either."""
    for is_device in (True, False):
        offered = any(
            label[0] == "pool evicts" and (int(label[1]) < ONE.device_pages) == is_device
            for label in steps
        )
        if not offered:
            assert not real.try_evict(is_device=is_device)


def walk(rng: random.Random, world: World, seen: set[State]) -> None:
    """Go one way through the world, the real pool beside it."""
    rules, real, state = world.rules, RealPool.make(), world.start()
    way: list[Label] = []
    for _ in range(200):
        steps = list(world.steps(state))
        if not steps:
            break
        label, _, after = rng.choice(steps)
        if label[0] in RARE and rng.random() < 0.8:
            continue
        if not happens(real, rules, state, label, after):
            continue
        way.append(label)
        state = after
        seen.add(world.canonical(state))
        assert real.counts() == counts_of(rules, state), way
    check_evictable(real, [label for label, _, _ in world.steps(state)])


@pytest.mark.parametrize("size", [ONE, TWO], ids=lambda size: size.name)
def test_the_pool_goes_every_way_that_a_world_goes(size: Size) -> None:
    rng, world, seen = random.Random(1), World(size), set[State]()
    for _ in range(300):
        walk(rng, world, seen)
    print(f"{size.name}: {len(seen)} states met")
    assert len(seen) > 1000
