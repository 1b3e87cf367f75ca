"""Compare served answers with cold runs of the same requests, each alone.

An answer is right if its tokens are and if every row of logits they were drawn from hashes to the
same bytes. Requests that are equal, prompt and sampling, are run once. This module does not know
how a cold run is made.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from attrs import frozen

from kvlease.protocols.config import SamplingParams
from kvlease.services.cold import ColdAnswer, ColdRequest
from kvlease.services.driver import TurnRecord
from kvlease.services.sessions import Tokens

ColdRunner: TypeAlias = Callable[
    [Sequence[ColdRequest], Callable[[ColdAnswer], None]], Awaitable[None]
]
"""Answers requests cold and reports each answer; see `cold.run_cold`."""


@frozen
class Mismatch:
    """One turn whose answer is not the cold run's."""

    session: str
    turn: int
    reason: str

    def __str__(self) -> str:
        """Name the turn and what differs first."""
        return f"{self.session}, turn {self.turn}: {self.reason}"


def first_difference(record: TurnRecord, cold: ColdAnswer) -> str | None:
    """Say where a served answer leaves the cold one first, or return None."""
    for place, (mine, theirs) in enumerate(zip(record.tokens, cold.tokens, strict=False), 1):
        if mine != theirs:
            return f"token {place} is {mine}, a cold run gives {theirs}"
        if record.digests[place - 1] != cold.digests[place - 1]:
            return f"the logits of token {place} differ from a cold run's"
    if len(record.tokens) != len(cold.tokens):
        return f"{len(record.tokens)} tokens, a cold run gives {len(cold.tokens)}"
    return None


async def verify(
    records: Sequence[TurnRecord],
    run_cold: ColdRunner,
    advance: Callable[[int], None] | None = None,
) -> list[Mismatch]:
    """Run every recorded request cold and return the turns that differ, in the records' order.

    Args:
        records: the answers under test, with digests.
        run_cold: makes the cold answers.
        advance: is called with the number of records checked so far.

    Checkpoints: as ``run_cold``.
    """
    users: dict[tuple[Tokens, SamplingParams], list[int]] = {}
    for place, record in enumerate(records):
        users.setdefault((record.prompt, record.sampling), []).append(place)
    requests = [
        ColdRequest(number, prompt, sampling) for number, (prompt, sampling) in enumerate(users)
    ]
    places = list(users.values())
    found: dict[int, Mismatch] = {}
    checked = 0

    def compare(answer: ColdAnswer) -> None:
        nonlocal checked
        for place in places[answer.number]:
            record = records[place]
            reason = first_difference(record, answer)
            if reason is not None:
                found[place] = Mismatch(record.session, record.turn, reason)
            checked += 1
        if advance is not None:
            advance(checked)

    await run_cold(requests, compare)
    assert checked == len(records), "every record is compared once"
    return [found[place] for place in sorted(found)]
