"""Cold runs: answer requests alone, in processes of their own, for comparison with served answers.

A worker process opens an engine without a prefix cache and answers one request at a time, read as
JSON lines from stdin; it ends with its stdin. Nothing that served the answers under test can touch
it. Several workers share the requests, one a core. This module does not compare.
"""

import os
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import cast, final

import msgspec
import trio
from attrs import evolve

import kvlease
from kvlease.errors import InternalError
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.services.driver import ask


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


@final
class _Worker:
    """The near end of one worker process."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._received = bytearray()

    async def say(self, message: msgspec.Struct) -> None:
        """Send one line."""
        stdin = self._process.stdin
        assert stdin is not None, "workers are started with a pipe"
        await stdin.send_all(msgspec.json.encode(message) + b"\n")

    async def hear(self) -> ColdAnswer:
        """Receive one line."""
        stdout = self._process.stdout
        assert stdout is not None, "workers are started with a pipe"
        while b"\n" not in self._received:
            chunk = await stdout.receive_some()
            if not chunk:
                status = await self._process.wait()
                raise InternalError(f"a cold run ended with status {status} before its answer")
            self._received += chunk
        line, _, rest = self._received.partition(b"\n")
        self._received = bytearray(rest)
        return msgspec.json.decode(line, type=ColdAnswer)


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
    shared = iter(requests)
    async with trio.open_nursery() as nursery:
        for _ in range(min(processes, len(requests))):
            nursery.start_soon(_drive, setup, shared, on_answer)


async def _drive(
    setup: ColdSetup, shared: Iterator[ColdRequest], on_answer: Callable[[ColdAnswer], None]
) -> None:
    home = str(Path(kvlease.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    # A session of its own keeps an interrupt at the terminal from reaching the worker; it ends
    # here, or with its stdin if this process is killed.
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "kvlease.services.cold"],
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        worker = _Worker(process)
        await worker.say(setup)
        for request in shared:
            await worker.say(request)
            on_answer(await worker.hear())
    except trio.BrokenResourceError as error:
        raise InternalError("a cold run ended before it took its request") from error
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@contextmanager
def _answers_alone_on_stdout() -> Generator[int, None, None]:
    """Keep anything but answers off the pipe: stdout becomes stderr, the pipe is lent."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    try:
        yield pipe
    finally:
        os.close(pipe)


async def _serve(pipe: int) -> None:
    """The far end: open the engine that the first line asks for, and answer line by line."""
    read = cast("Callable[[], Awaitable[bytes]]", trio.wrap_file(sys.stdin.buffer).readline)
    setup = msgspec.json.decode(await read(), type=ColdSetup)
    async with kvlease.open_engine(setup.model, setup.config) as engine:
        while line := await read():
            request = msgspec.json.decode(line, type=ColdRequest)
            answer, _ = await ask(engine, request.prompt, request.sampling)
            found = ColdAnswer(request.number, tuple(answer.tokens), tuple(answer.digests))
            os.write(pipe, msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    with _answers_alone_on_stdout() as answers:
        trio.run(_serve, answers)
