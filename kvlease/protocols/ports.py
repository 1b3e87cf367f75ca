"""What the rules need from the world: streams, completions, a model, a clock.

Each port has a CPU implementation in ``runtime`` (a worker thread), a CUDA one behind the same
methods, and simulated ones in tests; faults are injected by wrapping a port, never in product code.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, final, runtime_checkable

import msgspec
from attrs import evolve, frozen

from kvlease.errors import UsageError
from kvlease.protocols.schema import Schema
from kvlease.units import RequestId, StepId, TransferId

if TYPE_CHECKING:
    from kvlease.protocols.ownership import StepLease


class CompletionState(Enum):
    """Where a piece of device work stands; the order of the values is the order of life."""

    PLANNED = "planned"
    RECORDED = "recorded"
    DONE = "done"
    FAILED = "failed"
    REVOKED = "revoked"

    __hash__ = object.__hash__  # Enum's own costs more than the rest of a transition

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen."""
        return self in (CompletionState.DONE, CompletionState.FAILED, CompletionState.REVOKED)


class DevicePoint(Protocol):
    """A place in the order of a device's work, recorded there (never a promise to record one)."""

    def hold(self) -> None:
        """Hold the calling stream worker's device stream here until the device has passed it.

        Only the device waits; the call returns at once.
        """
        ...


class Completion(Protocol):
    """The end of the work that makes some bytes true; never a bare event.

    A completion that ends FAILED or REVOKED raises TransferFailed from both waits.
    """

    @property
    def state(self) -> CompletionState:
        """The state now; reading it never calls the device."""
        ...

    async def wait_recorded(self) -> None:
        """Wait until the work is in its stream's order, so that a stream can be made to wait."""
        ...

    async def wait_done(self) -> None:
        """Wait until the bytes are true."""
        ...

    def block_until_final(self) -> None:
        """Hold the calling stream worker until the work has ended; never on the Trio thread."""
        ...


class Stream(Protocol):
    """An ordered queue of device work; nothing here blocks the Trio thread."""

    def launch(self, work: Callable[[], None]) -> None:
        """Queue work; it starts after all work queued before it has ended.

        An exception in ``work`` skips what was launched later on the same scope and fails the
        scope's next `record`.
        """
        ...

    def wait(self, completion: Completion) -> None:
        """Order all later work of this stream behind a recorded completion."""
        ...

    def record(self) -> Completion:
        """Return the completion of everything launched so far on this scope."""
        ...

    def scope(self) -> "Stream":
        """Return a handle on the same queue whose failures stay its own."""
        ...


class Clock(Protocol):
    """Monotonic time in seconds."""

    def now(self) -> float:
        """Return seconds since an arbitrary start."""
        ...


@frozen
class Sampling:
    """How to draw one sequence's next tokens.

    temperature 0 is greedy. top_k 0 and top_p 1.0 switch those filters off. ``banned`` tokens
    (an EOS before ``min_tokens``) get no probability. The draw is keyed by (seed, position), so it
    does not depend on the batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    banned: tuple[int, ...] = ()
    logprobs: int | None = None
    """How many top alternatives to report with each token; None reports none, not even its own."""

    @property
    def is_greedy(self) -> bool:
        """Whether the best logit is the token, and nothing else is told about it."""
        return self.temperature == 0 and not self.banned and self.logprobs is None


@frozen
class SequenceInput:
    """One sequence's part in a step.

    tokens are the input ids at positions start .. start + len(tokens) - 1. ``sample`` is None for a
    chunk whose end is not the prompt's end. ``may_produce`` bounds the tokens that a step may
    return; with arithmetic it is above 1 for all of a batch or none, and only where every
    ``sample`` is greedy.
    """

    request: RequestId
    start: int
    tokens: Sequence[int]
    sample: Sampling | None
    may_produce: int = 1


@frozen
class StepInput:
    """A batch: its sequences in the order of the step lease's members."""

    step: StepId
    sequences: tuple[SequenceInput, ...]
    digests: bool = False
    """Whether to return a hash of each sampled row of logits, for bit-exact comparison."""

    def following(self, tokens: Iterable[int]) -> "StepInput":
        """Return the step that goes on from a token drawn of each sequence."""
        sequences = tuple(
            evolve(part, start=part.start + len(part.tokens), tokens=(token,))
            for part, token in zip(self.sequences, tokens, strict=True)
        )
        return evolve(self, sequences=sequences)


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """One token drawn, with what the caller asked to know about it."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    digest: bytes | None = None


class StepResult(Protocol):
    """What a forward leaves behind; readable once the stream's work is done."""

    def tokens(self) -> Sequence[Sequence[SampledToken]]:
        """Return per sequence the tokens drawn (none for a sequence with ``sample`` None)."""
        ...


class ModelRunner(Protocol):
    """A model that runs one step under a step lease, without knowing Trio."""

    @property
    def schema(self) -> Schema:
        """The cached state this model keeps."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1."""
        ...

    @property
    def max_positions(self) -> int:
        """The longest sequence, prompt and answer together, in tokens."""
        ...

    @property
    def eos_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of weights and geometry: part of the cache identity (R10)."""
        ...

    async def forward(self, inputs: StepInput, lease: "StepLease", stream: Stream) -> StepResult:
        """Launch one step on the stream, awaiting one layer's lease at a time.

        Ownership: borrows the lease; rows are written only through it. Raises TransferFailed when
        a layer's transfer failed; the caller then discards the step.
        """
        ...


@runtime_checkable
class CompilesAhead(Protocol):
    """A model runner whose kernels are compiled when they are first launched, or before that."""

    def compile_ahead(self, sessions: int, pages: int, told: Callable[[int, int], None]) -> int:
        """Compile what steps of up to so many sequences of so many pages each launch.

        For a thread; blocks. Returns the number of kernels. ``told`` hears from time to time how
        many of how many are compiled; what it raises ends the work.
        """
        ...


class CopyPart(NamedTuple):
    """What an order moves something of: one component of one layer."""

    layer: int
    component: str


@final
@frozen(eq=False)
class CopyParts:
    """The parts of an order, in layer order, at least one, and what follows from them.

    Shared by all orders that move the same: planning a load would be mostly these.

    Raises UsageError when they are out of order.
    """

    each: tuple[CopyPart, ...]

    def __attrs_post_init__(self) -> None:
        """Refuse parts out of order."""
        for one, other in pairwise(self.each):
            if other.layer < one.layer:
                raise UsageError(f"layer {other.layer} is out of order: it follows {one.layer}")

    def __iter__(self) -> Iterator[CopyPart]:
        """Iterate over the parts."""
        return iter(self.each)

    def __len__(self) -> int:
        """Count the parts."""
        return len(self.each)

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The layers of the first part and of the last."""
        return self.each[0].layer, self.each[-1].layer

    @cached_property
    def layers(self) -> frozenset[int]:
        """The layers of all parts."""
        return frozenset(part.layer for part in self.each)

    @cached_property
    def name(self) -> str:
        """What to call them in errors."""
        first, last = self.each[0], self.each[-1]
        if len(self.each) == 1:
            return f"layer {first.layer} {first.component}"
        return f"layers {first.layer} to {last.layer}"


class CopyOrder(msgspec.Struct, frozen=True):
    """Some of one transfer, ready to be copied in one piece.

    A load has an order for each of its parts, or for each group of layers that move together,
    because its readers wait for layers one by one. Nobody reads a store before its end, so it is
    one order.

    ``run`` moves the bytes and returns how many, which have to be ``nbytes``; it is called once, on
    the worker of the stream that carries the transfer. A device's are only enqueued by then. Both
    ends stay leased until they have been moved (R7).

    ``source`` is the tier that it reads: some of a load's copies stay within the device. The last
    three tell more of what it writes: ``sizes`` are the bytes of each part; ``places`` lists the
    pages, or the slots of sequence state, that it fills. ``target`` borrows their memory, in any
    number of pieces: it is for whoever damages or checks copies on the CPU, and the same lease
    covers it.
    """

    transfer: TransferId
    kind: str
    source: Literal["device", "host"]
    parts: CopyParts
    nbytes: int
    run: Callable[[], int]
    sizes: Callable[[], Sequence[int]]
    places: Callable[[], Sequence[int]]
    target: Callable[[], Sequence[memoryview]]

    @property
    def layer(self) -> int:
        """The layer of its first part."""
        return self.parts.ends[0]

    @property
    def last_layer(self) -> int:
        """The layer of its last part."""
        return self.parts.ends[1]

    @property
    def component(self) -> str:
        """The component of its first part."""
        return self.parts.each[0].component

    @property
    def name(self) -> str:
        """What to call it beside its transfer, in errors."""
        return self.parts.name


class Copier(Protocol):
    """Who executes copy orders; faults and delays are injected by wrapping it."""

    def copy(self, order: CopyOrder) -> int:
        """Execute the order on the calling stream worker; return the bytes moved."""
        ...
