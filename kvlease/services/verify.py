"""Compare served answers with cold runs of the same requests, each alone.

An answer is right if its tokens are and if every row of logits they were drawn from hashes to the
same bytes. The cold engine has no prefix cache and serves one request at a time, so nothing that is
under test (restores, sharing, batching, chunks, preemption) can touch its answers. Requests that
are equal, prompt and sampling, are run once. This module knows an engine by one method.
"""

from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.services.driver import Answer, ServingEngine, TurnRecord, ask
from kvlease.services.sessions import Tokens


@frozen
class Mismatch:
    """One turn whose answer is not the cold run's."""

    session: str
    turn: int
    reason: str

    def __str__(self) -> str:
        """Name the turn and what differs first."""
        return f"{self.session}, turn {self.turn}: {self.reason}"


def cold_config(config: EngineConfig) -> EngineConfig:
    """Return the configuration of a cold run: nothing cached, nothing shared, one at a time."""
    return evolve(config, prefix_cache=False, host_pages=0, max_sessions=1, digests=True)


def first_difference(record: TurnRecord, cold: Answer) -> str | None:
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
    engine: ServingEngine,
    records: Sequence[TurnRecord],
    advance: Callable[[int], None] | None = None,
) -> list[Mismatch]:
    """Run every recorded request cold and return the turns that differ, in the records' order.

    Args:
        engine: a cold one, see `cold_config`; borrowed.
        records: the answers under test, with digests.
        advance: is called with the number of records checked so far.

    Checkpoints: always.
    """
    cold: dict[tuple[Tokens, SamplingParams], Answer] = {}
    found: list[Mismatch] = []
    for checked, record in enumerate(records, 1):
        key = (record.prompt, record.sampling)
        if key not in cold:
            cold[key], _ = await ask(engine, record.prompt, record.sampling)
        reason = first_difference(record, cold[key])
        if reason is not None:
            found.append(Mismatch(record.session, record.turn, reason))
        if advance is not None:
            advance(checked)
    return found
