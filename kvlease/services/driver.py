"""Serve sessions against an engine, as their users would, and keep count.

So many workers take sessions from a list and go through them turn by turn. What a turn got is kept
as a record where somebody wants it (verification does); the tally only counts. This module knows
an engine by two methods, so that tests can put a small one in its place.
"""

import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio
from attrs import define, field, frozen

from kvlease.errors import BadInput, EngineFull, OperatingError
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import Usage
from kvlease.runtime.request import GenerateResult, TokenEvent
from kvlease.services.sessions import Session, Tokens, Turn, num_tokens, pack
from kvlease.services.workload import has_markup_error

HUNG_GRACE_S = 5.0
"""How long after its deadline a request may still end before its session counts as hung."""


class AnswerStream(Protocol):
    """An answer under way."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Yield the answer's tokens."""
        ...

    @property
    def result(self) -> GenerateResult:
        """The result, once the last token has come."""
        ...


class ServingEngine(Protocol):
    """What a driver needs of an engine."""

    def generate(
        self, tokens: Tokens, sampling: SamplingParams, /
    ) -> AbstractAsyncContextManager[AnswerStream]:
        """Open an answer; leaving the block calls it off."""
        ...


@frozen
class TurnRecord:
    """One answered turn, with what a cold run of it needs."""

    session: str
    turn: int
    prompt: Tokens
    sampling: SamplingParams
    tokens: tuple[int, ...]
    digests: tuple[bytes | None, ...]


@define
class Tally:
    """Counts over a run; ``ttft_s`` and ``tpot_s`` have one sample a turn."""

    sessions: int = 0
    turns: int = 0
    hung_sessions: int = 0
    failed_turns: int = 0
    tool_call_errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_device: int = 0
    hit_host: int = 0
    hit_storage: int = 0
    hit_remote: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    ttft_s: list[float] = field(factory=list[float])
    tpot_s: list[float] = field(factory=list[float])
    complaints: list[str] = field(factory=list[str])
    """Sentences about turns that failed or hung."""

    def count(self, usage: Usage, output_tokens: int) -> None:
        """Add one answered turn."""
        self.turns += 1
        self.prompt_tokens += usage.prompt
        self.output_tokens += output_tokens
        self.hit_device += usage.hit_device
        self.hit_host += usage.hit_host
        self.hit_storage += usage.hit_storage
        self.hit_remote += usage.hit_remote
        self.computed_tokens += usage.computed
        self.recomputed_tokens += usage.recomputed


class Follower(Protocol):
    """Who is told of a run's progress."""

    def turn_ended(self, tally: Tally) -> None:
        """A turn was answered, failed or hung; the tally has it."""
        ...


@define
class Answer:
    """One turn's tokens as they came, with the times of the first and the last."""

    tokens: list[int] = field(factory=list[int])
    digests: list[bytes | None] = field(factory=list[bytes | None])
    first_s: float = 0.0
    last_s: float = 0.0


async def ask(
    engine: ServingEngine, prompt: Tokens, sampling: SamplingParams
) -> tuple[Answer, Usage]:
    """Get one answer whole, trying again when the engine is full.

    Checkpoints: always. Raises what the engine raises.
    """
    while True:
        answer = Answer()
        try:
            async with engine.generate(prompt, sampling) as stream:
                async for event in stream:
                    answer.last_s = trio.current_time()
                    answer.first_s = answer.first_s or answer.last_s
                    answer.tokens.append(event.token)
                    answer.digests.append(event.digest)
                return answer, stream.result.usage
        except EngineFull as error:
            await trio.sleep(error.retry_after_s)


@define
class Driver:
    """Serves one workload.

    Attributes:
        engine: borrowed for the run.
        deadline_s: after this time a request must have ended (R9); a little later its session
            counts as hung and is called off.
        keep_records: whether answered turns are kept, for verification.
        follower: is told of every turn.
    """

    engine: ServingEngine
    deadline_s: float
    keep_records: bool = False
    follower: Follower | None = None
    tally: Tally = field(factory=Tally)
    records: list[TurnRecord] = field(factory=list[TurnRecord])

    async def serve(self, sessions: Iterable[Session], workers: int) -> None:
        """Go through all sessions with so many at a time.

        Checkpoints: always; cancelled, it calls the open requests off.
        Raises BadInput when a request cannot be served at all, with the session's name.
        """
        shared = iter(sessions)
        async with trio.open_nursery() as nursery:
            for first in itertools.islice(shared, workers):
                nursery.start_soon(self._work, first, shared)

    async def _work(self, first: Session, shared: Iterator[Session]) -> None:
        """Serve a session, then others from the shared iterator, until none is left."""
        session: Session | None = first
        while session is not None:
            self.tally.sessions += 1
            await self._serve_session(session)
            session = next(shared, None)

    async def _serve_session(self, session: Session) -> None:
        """Go through one session's turns; a turn without an answer ends it."""
        history = b""
        for number, turn in enumerate(session.turns, 1):
            await trio.sleep(turn.pause_s)
            prompt = turn.added if turn.is_whole else history + turn.added
            answer = await self._turn(session, number, prompt, turn)
            if self.follower is not None:
                self.follower.turn_ended(self.tally)
            if answer is None:
                return
            history = prompt + pack(answer.tokens)

    async def _turn(
        self, session: Session, number: int, prompt: Tokens, turn: Turn
    ) -> Answer | None:
        started_s = trio.current_time()
        try:
            with trio.fail_after(self.deadline_s + HUNG_GRACE_S):
                answer, usage = await ask(self.engine, prompt, turn.sampling)
        except trio.TooSlowError:
            self.tally.hung_sessions += 1
            self.tally.complaints.append(
                f"{session.name}, turn {number}: no end {self.deadline_s:g} s after it began"
            )
            return None
        except OperatingError as error:
            self.tally.failed_turns += 1
            self.tally.complaints.append(f"{session.name}, turn {number}: {error}")
            return None
        except BadInput as error:
            raise type(error)(f"{session.name}, turn {number}: {error}") from error
        self._keep(session, number, prompt, turn, answer)
        self.tally.count(usage, len(answer.tokens))
        if answer.tokens:
            self.tally.ttft_s.append(answer.first_s - started_s)
        if len(answer.tokens) > 1:
            self.tally.tpot_s.append((answer.last_s - answer.first_s) / (len(answer.tokens) - 1))
        return answer

    def _keep(
        self, session: Session, number: int, prompt: Tokens, turn: Turn, answer: Answer
    ) -> None:
        self.tally.tool_call_errors += has_markup_error(as_bytes(answer.tokens))
        if self.keep_records:
            self.records.append(
                TurnRecord(
                    session.name,
                    number,
                    prompt,
                    turn.sampling,
                    tuple(answer.tokens),
                    tuple(answer.digests),
                )
            )


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Return the bytes that byte-level tokens spell, leaving other tokens out."""
    return bytes(token for token in tokens if 0 <= token < 256)


def prompt_lengths(session: Session) -> Iterator[tuple[int, int]]:
    """Yield, turn by turn, the longest prompt and the longest prompt with its answer, in tokens."""
    length = 0
    for turn in session.turns:
        length += num_tokens(turn.added)
        yield length, length + turn.sampling.max_tokens
        length += turn.sampling.max_tokens
