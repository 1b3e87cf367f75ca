"""One call of ``generate`` as the scheduler and its caller share it.

The scheduler owns everything but the outbox's reading end; the caller sees tokens as they are
published and then one result, always (R9). Nothing here decides when a request runs.
"""

import hashlib
import math
from array import array
from collections.abc import Callable
from contextlib import suppress

import msgspec
import trio
from attrs import define, field, frozen

from kvlease.errors import KVLeaseError
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import Usage
from kvlease.protocols.ports import Sampling
from kvlease.units import RequestId

NO_PARENT = RequestId(0)
"""The parent of a request that is no fork."""


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """One published token of an answer.

    ``logprob`` and ``top_logprobs`` are there if asked for; ``digest`` hashes the row of logits it
    was drawn from, if the engine keeps digests.
    """

    index: int
    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    digest: bytes | None = None


@frozen
class GenerateResult:
    """How a request ended.

    finish_reason: ``stop`` (EOS or stop token), ``length``, ``cancelled``, ``deadline`` or
    ``failed``. Times in seconds: ``ttft_s`` from submission to the first token (None if none came),
    ``tpot_s`` the mean between later tokens (None below two).
    """

    tokens: tuple[int, ...]
    finish_reason: str
    usage: Usage
    ttft_s: float | None
    tpot_s: float | None
    digests: tuple[bytes, ...] = ()


Listener = Callable[[tuple[TokenEvent, ...]], None]
"""Is handed a request's tokens as they are published, on the scheduler's time: it must neither wait
nor raise."""


@define(eq=False)
class Request:
    """A request on its way through the engine; mutable, owned by the scheduler.

    ``prompt`` is int32 bytes, ``salt`` its tenant's part of the cache identity (R10). A
    ``listener`` gets the tokens in the stream's stead. ``hit_device`` and ``hit_host`` are filled
    at its first admission and corrected when a load fails, so that every prompt token stays in one
    bucket (R12).
    """

    id: RequestId
    prompt: bytes
    params: SamplingParams
    submitted_s: float
    deadline_s: float
    parent: RequestId = NO_PARENT
    salt: bytes = b""
    listener: Listener | None = None
    outbox: "trio.MemorySendChannel[tuple[TokenEvent, ...]]" = field(init=False)
    inbox: "trio.MemoryReceiveChannel[tuple[TokenEvent, ...]]" = field(init=False)
    ended: trio.Event = field(init=False, factory=trio.Event)
    result: GenerateResult | None = field(init=False, default=None)
    error: KVLeaseError | None = field(init=False, default=None)
    output: list[TokenEvent] = field(init=False, factory=list)
    num_handed_over: int = field(init=False, default=0)
    first_token_s: float | None = field(init=False, default=None)
    last_token_s: float | None = field(init=False, default=None)
    hit_device: int = field(init=False, default=0)
    hit_host: int = field(init=False, default=0)
    recomputed: int = field(init=False, default=0)
    is_admitted: bool = field(init=False, default=False)
    _sampling: Sampling | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        """Open the outbox; it never blocks the scheduler, max_tokens bounds it."""
        self.outbox, self.inbox = trio.open_memory_channel[tuple[TokenEvent, ...]](math.inf)

    @property
    def num_prompt(self) -> int:
        """Prompt length in tokens."""
        return len(self.prompt) // 4

    def prompt_tokens(self) -> "array[int]":
        """Return the prompt's token ids; the caller owns the array."""
        tokens = array("i")
        tokens.frombytes(self.prompt)
        return tokens

    def publish(self, events: tuple[TokenEvent, ...]) -> None:
        """Add a step's tokens to the answer; `hand_over` gives them to the caller.

        Nothing is added to a request that has ended: an engine that is closed ends its requests
        while their last steps still run.
        """
        if not self.ended.is_set():
            self.output.extend(events)

    def hand_over(self, now_s: float) -> None:
        """Give the caller the published tokens that he lacks; that he has gone is no error."""
        if self.num_handed_over == len(self.output):
            return
        events = tuple(self.output[self.num_handed_over :])
        self.num_handed_over = len(self.output)
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        if self.listener is not None:
            self.listener(events)
            return
        with suppress(trio.BrokenResourceError):
            self.outbox.send_nowait(events)

    def forget_hits(self) -> None:
        """What it was admitted with has come to nothing: its next admission is its first."""
        self.is_admitted = False
        self.hit_device = self.hit_host = 0

    def usage(self) -> Usage:
        """Return where the request's tokens came from; the prompt's buckets sum to it (R12)."""
        hits = self.hit_device + self.hit_host
        return Usage(
            prompt=self.num_prompt,
            hit_device=self.hit_device,
            hit_host=self.hit_host,
            computed=self.num_prompt - hits if self.is_admitted else 0,
            recomputed=self.recomputed,
            output=len(self.output),
        )

    def answer_hash(self) -> str:
        """Return a hash of the answer: its tokens, and the logits' digests if they are kept."""
        answer = hashlib.blake2b(digest_size=8)
        for event in self.output:
            answer.update(event.token.to_bytes(4, "little") + (event.digest or b""))
        return answer.hexdigest()

    def end(self, finish_reason: str, error: KVLeaseError | None = None) -> None:
        """Make the request terminal: set the result or the error and wake the caller.

        The first end counts; an engine that is going away may come before its scheduler.
        """
        if self.ended.is_set():
            return
        ttft = None if self.first_token_s is None else self.first_token_s - self.submitted_s
        tpot = None
        if (
            self.first_token_s is not None
            and self.last_token_s is not None
            and len(self.output) > 1
        ):
            tpot = (self.last_token_s - self.first_token_s) / (len(self.output) - 1)
        digests = tuple(e.digest for e in self.output if e.digest is not None)
        tokens = tuple(e.token for e in self.output)
        self.error = error
        self.result = GenerateResult(tokens, finish_reason, self.usage(), ttft, tpot, digests)
        self.ended.set()
        self.outbox.close()

    def sampling(self, eos: frozenset[int]) -> Sampling:
        """Return how to draw the next token, given how many are out."""
        if len(self.output) >= self.params.min_tokens:
            if self._sampling is None:
                self._sampling = self._draw(())
            return self._sampling
        stops = self.params.stop_tokens
        return self._draw(tuple(sorted(stops if self.params.ignore_eos else stops | eos)))

    def _draw(self, banned: tuple[int, ...]) -> Sampling:
        p = self.params
        return Sampling(p.temperature, p.top_k, p.top_p, p.seed, banned, p.logprobs)

    def finish_reason(self, token: int, num_output: int, eos: frozenset[int]) -> str | None:
        """Return why an answer of ``num_output`` tokens, ``token`` the last of them, is over."""
        p = self.params
        is_stop = token in p.stop_tokens or (token in eos and not p.ignore_eos)
        if is_stop and num_output >= p.min_tokens:
            return "stop"
        return "length" if num_output >= p.max_tokens else None
