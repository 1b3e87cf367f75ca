"""A stand-in for pools and runtime: plain poisoned tensors, views over them, an inline stream.

Drives a model's forward with sequences cut into chunks and batched in any way. Memory starts as NaN
bytes, pages and slots are handed out in random order, so a read outside what was written shows.
"""

import random
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

import torch
from attrs import define, field
from torch import Tensor

from kvlease.kernels.formats import storage_dtype, storage_width
from kvlease.kernels.models.deepseek_v4 import DeepseekV4
from kvlease.kernels.models.step_run import TokensDrawn
from kvlease.protocols.config import Device
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import Completion, Sampling, SequenceInput, StepInput, Stream
from kvlease.protocols.readiness import Openings
from kvlease.protocols.schema import RowFormat, Schema
from kvlease.protocols.views import EpochCell, OpenRows, PagedRows, SlotRows
from kvlease.units import LayerId, LeaseId, RequestId, StepId

T = TypeVar("T")


class InlineStream:
    """A stream that runs work at once."""

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def wait(self, completion: Completion) -> None:
        raise AssertionError("nothing in the rig is in flight")

    def record(self) -> Completion:
        raise AssertionError("nothing in the rig is in flight")

    def scope(self) -> Stream:
        return self


def run_now(coroutine: Coroutine[object, object, T]) -> T:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    raise AssertionError("the forward waited for something")


DEVICES: list[Device] = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
"""Where models are tried."""


def poisoned(shape: tuple[int, ...], fmt: RowFormat, device: Device = "cpu") -> Tensor:
    """Return memory full of NaN bytes."""
    rows = torch.empty(shape, dtype=storage_dtype(fmt), device=device)
    rows.view(torch.uint8).fill_(0xFF)
    return rows


@define
class RigSequence:
    """One sequence: its tokens so far, the pages it holds, and how far it was computed."""

    tokens: list[int]
    pages: list[int]
    slot: int
    computed: int = 0
    logits: list[Tensor] = field(factory=list)
    drawn: list[int] = field(factory=list)


class _Source:
    def __init__(
        self, rig: "Rig", members: Sequence[RigSequence], layer: LayerId, cell: EpochCell
    ) -> None:
        self._rig, self._layer, self._cell = rig, layer, cell
        tables = rig.tables(members)
        self._table, self._slots, self._sealed = tables

    def paged(self, name: str) -> PagedRows:
        base, planes = self._rig.rows[self._layer, name], self._rig.planes[self._layer, name]
        return PagedRows(name, base, self._table, self._cell, base.shape[1], planes)

    def opened(self, name: str) -> OpenRows:
        base, planes = self._rig.rows[self._layer, name], self._rig.planes[self._layer, name]
        floor = self._sealed * base.shape[1]
        return OpenRows(name, base, self._table, floor, self._cell, base.shape[1], planes)

    def ring(self, name: str) -> SlotRows:
        return SlotRows(name, self._rig.rings[self._layer, name], self._slots, self._cell)


class Rig:
    """Memory for a few sequences of one model, and steps over them."""

    def __init__(
        self, model: DeepseekV4, num_pages: int = 64, num_slots: int = 16, seed: int = 0
    ) -> None:
        self.model = model
        self.schema: Schema = model.schema
        self.random = random.Random(seed)
        self.device = model.device
        self.rows: dict[tuple[LayerId, str], Tensor] = {}
        self.planes: dict[tuple[LayerId, str], tuple[int, ...]] = {}
        self.rings: dict[tuple[LayerId, str], Tensor] = {}
        for layer in self.schema.layers:
            for span in layer.spans:
                shape = (num_pages, self.schema.rows_per_page(span), storage_width(span.format))
                self.rows[layer.id, span.name] = poisoned(shape, span.format, self.device)
                self.planes[layer.id, span.name] = span.format.planes
            for tail in layer.tails:
                ring = (num_slots, tail.ring_rows, storage_width(tail.format))
                self.rings[layer.id, tail.name] = poisoned(ring, tail.format, self.device)
        self._free_pages = list(range(num_pages))
        self._free_slots = list(range(num_slots))
        self.random.shuffle(self._free_pages)
        self.random.shuffle(self._free_slots)
        self._cached_tables: tuple[object, tuple[Tensor, Tensor, Tensor]] | None = None

    def start(self, tokens: Sequence[int]) -> RigSequence:
        """Add a sequence; nothing is computed yet."""
        return RigSequence(list(tokens), [], self._free_slots.pop())

    def release(self, sequence: RigSequence) -> None:
        """Give pages and slot back, poisoned."""
        for base in self.rows.values():
            pages = torch.tensor(sequence.pages, device=self.device)
            base.view(torch.uint8).index_fill_(0, pages, 0xFF)
        for ring in self.rings.values():
            ring[sequence.slot].view(torch.uint8).fill_(0xFF)
        self._free_pages += sequence.pages
        self._free_slots.append(sequence.slot)

    def fork(self, sequence: RigSequence) -> RigSequence:
        """Start another sequence from a page boundary: shared pages, and the kept tail alone.

        Of the rings only what the schema keeps is copied; the rest of the new slot stays poison.
        """
        boundary = sequence.computed
        assert boundary % self.schema.page_tokens == 0
        other = RigSequence(
            list(sequence.tokens), list(sequence.pages), self._free_slots.pop(), boundary
        )
        for layer in self.schema.layers:
            for tail in layer.tails:
                ring = self.rings[layer.id, tail.name]
                for position in range(max(boundary - tail.kept_rows, 0), boundary):
                    kept = ring[sequence.slot, position % tail.ring_rows, : tail.kept_width]
                    ring[other.slot, position % tail.ring_rows, : tail.kept_width] = kept
        return other

    def tables(self, members: Sequence[RigSequence]) -> tuple[Tensor, Tensor, Tensor]:
        """Return page table, slots and sealed page counts; the same tensors for all layers."""
        key = tuple((id(m), m.computed, len(m.pages)) for m in members)
        if self._cached_tables is None or self._cached_tables[0] != key:
            table = torch.zeros(
                (len(members), max(len(m.pages) for m in members)), dtype=torch.int64
            )
            for row, member in enumerate(members):
                table[row, : len(member.pages)] = torch.tensor(member.pages)
            slots = torch.tensor([m.slot for m in members])
            sealed = torch.tensor([m.computed // self.schema.page_tokens for m in members])
            self._cached_tables = key, (table, slots, sealed)
        return self._cached_tables[1]

    def step_source(self, lease: StepLease, layer: LayerId) -> _Source:
        members = lease.tables
        assert isinstance(members, list)
        return _Source(self, members, layer, lease.cell)

    def step(
        self,
        work: Sequence[tuple[RigSequence, int]],
        sample: Sampling | None = None,
        *,
        digests: bool = False,
        ahead: int = 1,
    ) -> TokensDrawn:
        """Compute the next n tokens of each sequence in one batch; logits for each one's last.

        ``ahead`` tokens may be drawn of each: what it says comes after them is the caller's then.
        """
        inputs: list[SequenceInput] = []
        for number, (sequence, count) in enumerate(work):
            stop = sequence.computed + count
            assert sequence.computed < stop <= len(sequence.tokens)
            while len(sequence.pages) * self.schema.page_tokens < stop + ahead - 1:
                sequence.pages.append(self._free_pages.pop())
            part = sequence.tokens[sequence.computed : stop]
            how = sample or Sampling()
            request = RequestId(number + 1)
            inputs.append(SequenceInput(request, sequence.computed, part, how, ahead))
        # nothing is in flight in the rig, so the lease needs no members to wait for
        members = [sequence for sequence, _ in work]
        lease = StepLease(
            LeaseId(1), [], members, self, self.schema.num_layers, Openings(lambda: 0)
        )
        step_input = StepInput(StepId(1), tuple(inputs), digests)
        result = run_now(self.model.forward(step_input, lease, InlineStream()))
        lease.close()
        logits = result.logits
        assert logits is not None
        if self.device == "cuda":
            torch.cuda.synchronize()
        for row, ((sequence, count), tokens) in enumerate(zip(work, result.tokens(), strict=True)):
            drawn = [one.token for one in tokens]
            sequence.computed += count + len(drawn) - 1
            sequence.logits.append(logits[row].to("cpu", copy=True))
            sequence.drawn += drawn
        return result

    def run_alone(self, sequence: RigSequence, chunks: Sequence[int]) -> None:
        """Compute a sequence by itself in chunks of the given sizes."""
        for count in chunks:
            self.step([(sequence, count)])


def random_cuts(total: int, rng: random.Random, largest: int) -> list[int]:
    """Return chunk sizes that add up to ``total``."""
    cuts: list[int] = []
    while total:
        cuts.append(rng.randint(1, min(largest, total)))
        total -= cuts[-1]
    return cuts
