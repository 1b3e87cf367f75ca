"""The museum's bench: a unified pool whose copies run when the test says so.

Every row is filled with bytes that tell whose it is: the layer, the component, and all tokens up to
the page's end (or, in rings, up to its position). So "right" needs no model: a page holds the bytes
of its own prefix, or it holds somebody else's.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from attrs import define, evolve, field

from kvlease.pools.held import Held, PlannedTransfer
from kvlease.pools.memory import PoolSizes
from kvlease.pools.prefix_node import Tail
from kvlease.pools.prefix_walk import path_to
from kvlease.pools.storage import span_components, tail_components
from kvlease.pools.unified import UnifiedPool
from kvlease.protocols.geometries import (
    StoreFormat,
    V4Geometry,
    deepseek_v4_schema,
    gqa_schema,
    mla_indexer_schema,
)
from kvlease.protocols.schema import Schema
from kvlease.runtime.core import empty_layers
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.transfer import Transfer
from kvlease.runtime.transfer_plan import TransferPlan
from kvlease.units import LayerId
from tests.runtime.rig import PlainCopier

PAGE = 16
ROOT = b"museum"
V4 = V4Geometry(("sliding", "sparse", "heavy", "sparse"), 8, 4, 4, window=8, heavy_ratio=16)
"""Window of half a page; ratios 4 and 16."""


def v4_schema(window: int = 8, index_k: StoreFormat = "same") -> Schema:
    """Return a small DeepSeek-V4: sliding, sparse, heavy and sparse layers, pages of 16."""
    return deepseek_v4_schema(evolve(V4, window=window), PAGE, "float32", index_k_format=index_k)


SCHEMAS: dict[str, Schema] = {
    "v4": v4_schema(),
    "v4 window over a page": v4_schema(window=40),
    "v4 bf16 index keys": v4_schema(index_k="bf16"),
    "v4 fp8 index keys": v4_schema(index_k="fp8"),
    "mla with indexer": mla_indexer_schema(4, 8, 4, 4, PAGE),
    "gqa": gqa_schema(4, 2, 4, PAGE),
}
MLA = SCHEMAS["mla with indexer"]


def tokens_of(seed: int, num_tokens: int) -> bytes:
    """Return a prompt as int32 bytes; longer ones of one seed begin with the shorter ones."""
    return (
        np.random.default_rng(seed).integers(0, 1000, 4096, dtype=np.int32)[:num_tokens].tobytes()
    )


def own_bytes(layer: int, name: str, tokens: bytes, like: torch.Tensor) -> torch.Tensor:
    """Return the bytes that a place of this layer and component has after these tokens."""
    drawn = hashlib.shake_128(b"%d %s " % (layer, name.encode()) + tokens).digest(like.nbytes)
    return torch.frombuffer(bytearray(drawn), dtype=like.dtype).view(like.shape)


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold equal bytes (poison included, which equals no number)."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@define
class Bench:
    """A pool on two tiers; requests, copies and ends are calls of the test."""

    schema: Schema = field(factory=lambda: SCHEMAS["v4"])
    device_pages: int = 16
    host_pages: int = 16
    device_tails: int = 12
    host_tails: int = 12
    slots: int = 6
    log: EventLog = field(factory=lambda: EventLog(level="off"))
    pool: UnifiedPool = field(init=False)
    running: list[Held] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        """Allocate, poisoned."""
        tails = (self.device_tails, self.host_tails) if self.schema.needs_tail else (0, 0)
        sizes = PoolSizes(self.device_pages, self.host_pages, *tails, self.slots)
        self.pool = UnifiedPool(self.schema, sizes, self.log, poison=True)

    # Requests

    def begin(self, tokens: bytes, limit: int = 99, root: bytes = ROOT) -> Held | None:
        """Match a prompt and make it run; None, with everything given back, if there is no room."""
        num_pages = -(-len(tokens) // (4 * PAGE))
        match = self.pool.match(root, tokens, limit)
        held = self.pool.open(match, num_pages - match.num_pages, 1)
        if held is None:
            self.pool.drop(match)
            return None
        self.running.append(held)
        return held

    def start(self, tokens: bytes, limit: int = 99, root: bytes = ROOT) -> Held:
        """As `begin`, where there is room."""
        held = self.begin(tokens, limit, root)
        assert held is not None, "the test left too little room"
        return held

    def compute(self, held: Held, tokens: bytes, *, tails: bool = True) -> None:
        """Write, seal and keep everything that whole pages of a prompt still miss."""
        pool, lease = self.pool, held.lease
        for page in range(lease.sealed, len(tokens) // (4 * PAGE)):
            assert pool.grow(held, page + 1 - len(lease.pages), 1)
            self.write_page(held, tokens, page)
            end = (page + 1) * PAGE
            lease.commit(end)
            pool.seal(held, tokens[: 4 * end], page + 1, 1)
            slot = pool.tail_slot() if tails and self.schema.needs_tail else None
            if slot is not None:
                pool.keep_tails([(lease.slot, slot, end)])
                pool.put_tail(held, end, slot, rolling=False)

    def write_page(self, held: Held, tokens: bytes, page: int) -> None:
        """Fill one page of a sequence's table, and its rings up to the page's end."""
        memory, lease = self.pool.memory, held.lease
        for layer, span in span_components(self.schema):
            rows = memory.spans.rows(layer, span.name)[lease.pages[page]]
            rows.copy_(own_bytes(layer, span.name, tokens[: 4 * (page + 1) * PAGE], rows))
        for layer, tail in tail_components(self.schema):
            ring = memory.rings.ring(layer, tail.name)[lease.slot]
            for position in range(page * PAGE, (page + 1) * PAGE):
                row = ring[position % tail.ring_rows]
                row.copy_(own_bytes(layer, tail.name, tokens[: 4 * (position + 1)], row))

    def close(self, held: Held) -> None:
        """End a request."""
        self.running.remove(held)
        self.pool.close(held)

    # Copies

    def carry(self, planned: PlannedTransfer, deadline_s: float = 5.0) -> Transfer:
        """Make the transfer of a plan, as the engine does, for tests of who may read it when."""
        plan = TransferPlan(
            planned.id,
            planned.kind,
            planned.copies,
            self.schema.num_layers,
            deadline_s,
            "bench",
            empty_layers=empty_layers(
                self.schema, spans=bool(planned.source), tails=bool(planned.tails)
            ),
        )
        planned.carrier = Transfer(plan)
        return planned.carrier

    def bring(self, planned: PlannedTransfer | None) -> None:
        """Copy everything of a transfer and end it well."""
        assert planned is not None
        for order in planned.copies:
            assert order.run() == order.nbytes
        self.pool.transfers.done(planned)
        self.pool.transfers.settled(planned)
        self.forget(planned)

    def lose(self, planned: PlannedTransfer, reason: str = "failed") -> None:
        """End a transfer without its bytes, with no copy of it left running."""
        self.pool.lost(planned, reason, ())
        self.pool.transfers.settled(planned)
        self.forget(planned)

    def forget(self, planned: PlannedTransfer) -> None:
        """Let readers wait no longer for a transfer that has ended."""
        for held in self.running:
            if planned in held.arrivals and not planned.is_lost:
                held.arrivals.remove(planned)

    def run_all(self, transfer: Transfer, skip: Iterable[int] = ()) -> None:
        """Run a carried transfer's copies, but for those at ``skip``."""
        for index in range(len(transfer.plan.copies)):
            if index not in skip:
                transfer.run_copy(index, PlainCopier())

    def plan_store(self, held: Held, tails: Sequence[Tail] = ()) -> PlannedTransfer | None:
        """Plan the store of a running request's sealed pages."""
        return self.pool.transfers.plan_store(held, 1, tails=tails)

    # Whole stories

    def cache(self, tokens: bytes, *, tails: bool = True) -> None:
        """Compute a prompt's whole pages and leave them cached on the device."""
        held = self.start(tokens)
        if held.load is not None:
            self.bring(held.load)
        self.compute(held, tokens, tails=tails)
        self.close(held)

    def store(self, tokens: bytes) -> PlannedTransfer | None:
        """Plan the store of everything of a prompt that is cached on the device alone."""
        held = self.start(tokens)
        if held.load is not None:
            self.bring(held.load)
        kept = [tail for node in path_to(held.cursor.node) for tail in node.tails.values()]
        try:
            return self.plan_store(held, kept)
        finally:
            self.close(held)

    def cache_on_host(self, tokens: bytes) -> None:
        """Leave a prompt's whole pages on the host alone."""
        self.cache(tokens)
        self.bring(self.store(tokens))
        self.drop_device()

    def drop_device(self) -> None:
        """Evict from the device whatever the host has too."""
        memory, index = self.pool.memory, self.pool.index
        memory.take_back(index.evict_tails(99, "device"))
        memory.take_back(index.evict_device(99, can_drop=False))

    # Looking

    def hit(self, tokens: bytes) -> tuple[int, int]:
        """Return how many pages of a prompt are usable: on the device, and on the host only."""
        match = self.pool.match(ROOT, tokens, 99)
        found = match.device_pages, match.host_pages
        self.pool.drop(match)
        return found

    def wrong(self, held: Held, tokens: bytes, num_pages: int) -> Iterator[str]:
        """Name every place of the first pages, and of the rings at their end, with other bytes."""
        memory, lease = self.pool.memory, held.lease
        for page in range(num_pages):
            yield from self.wrong_rows(lease.pages[page], tokens, page, "device")
        end = num_pages * PAGE
        for layer, tail in tail_components(self.schema):
            ring = memory.rings.ring(layer, tail.name)[lease.slot]
            for position in range(max(0, end - tail.kept_rows), end):
                row = ring[position % tail.ring_rows]
                own = own_bytes(layer, tail.name, tokens[: 4 * (position + 1)], row)
                if not is_same(row[: tail.kept_width], own[: tail.kept_width]):
                    yield f"layer {layer} {tail.name} position {position}"

    def wrong_rows(self, page_id: int, tokens: bytes, page: int, tier: str) -> Iterator[str]:
        """Name the components of one page of memory with other bytes than page ``page``'s own."""
        store = self.pool.memory.spans if tier == "device" else self.pool.memory.host_spans
        for layer, span in span_components(self.schema):
            rows = store.rows(layer, span.name)[page_id]
            if not is_same(
                rows, own_bytes(layer, span.name, tokens[: 4 * (page + 1) * PAGE], rows)
            ):
                yield f"{tier} page {page_id} ({page}) layer {layer} {span.name}"

    def check(self) -> None:
        """Recount everything against its holders."""
        self.pool.check(self.running, [])

    def snapshot(self) -> dict[tuple[str, LayerId, str], torch.Tensor]:
        """Copy all memory, by store, layer and component."""
        memory = self.pool.memory
        found: dict[tuple[str, LayerId, str], torch.Tensor] = {}
        for layer, span in span_components(self.schema):
            found["device", layer, span.name] = memory.spans.rows(layer, span.name).clone()
            found["host", layer, span.name] = memory.host_spans.rows(layer, span.name).clone()
        for layer, tail in tail_components(self.schema):
            found["ring", layer, tail.name] = memory.rings.ring(layer, tail.name).clone()
            if tail.kept_rows:
                found["tail", layer, tail.name] = memory.tails.kept(layer, tail.name).clone()
        return found
