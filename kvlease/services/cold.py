"""Cold runs: answer requests alone, in processes of their own, for comparison with served answers.

A worker process opens an engine without a prefix cache and answers one request at a time, read as
JSON lines from stdin; it ends with its stdin. Nothing that served the answers under test can touch
it. Several workers share the requests, one a core. This module does not compare.
"""

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import msgspec
import trio
from attrs import evolve

import kvlease
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.services.driver import ask
from kvlease.services.processes import Crew, answers_alone_on_stdout


class ColdSetup(msgspec.Struct, frozen=True):
    """A worker's first line: which engine to open."""

    model: str | None
    config: EngineConfig


class ColdRequest(msgspec.Struct, frozen=True):
    """One request, alone; ``prompt`` is int32 bytes."""

    number: int
    prompt: bytes
    sampling: SamplingParams


class ColdAnswer(msgspec.Struct, frozen=True):
    """The answer to the request of that number, with the hash of each row of logits."""

    number: int
    tokens: tuple[int, ...]
    digests: tuple[bytes | None, ...]


def cold_config(config: EngineConfig) -> EngineConfig:
    """Return the configuration of a cold run: nothing cached, nothing shared, one at a time."""
    return evolve(config, prefix_cache=False, host_pages=0, max_sessions=1, digests=True)


async def run_cold(
    setup: ColdSetup,
    requests: Sequence[ColdRequest],
    processes: int,
    on_answer: Callable[[ColdAnswer], None],
) -> None:
    """Answer all requests cold, in so many processes, and report each answer as it comes.

    Checkpoints: always; cancelled, it ends the processes.
    Raises InternalError when a worker dies; what it said is on stderr.
    """
    crew = Crew("kvlease.services.cold", "a cold run", setup, ColdAnswer, processes)
    await crew.run(requests, on_answer)


async def _serve(say: Callable[[msgspec.Struct], None]) -> None:
    """The far end: open the engine that the first line asks for, and answer line by line."""
    read = cast("Callable[[], Awaitable[bytes]]", trio.wrap_file(sys.stdin.buffer).readline)
    setup = msgspec.json.decode(await read(), type=ColdSetup)
    async with kvlease.open_engine(setup.model, setup.config) as engine:
        while line := await read():
            request = msgspec.json.decode(line, type=ColdRequest)
            answer, _ = await ask(engine, request.prompt, request.sampling)
            say(ColdAnswer(request.number, tuple(answer.tokens), tuple(answer.digests)))


if __name__ == "__main__":
    with answers_alone_on_stdout() as answer:
        trio.run(_serve, answer)
