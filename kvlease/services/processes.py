"""Worker processes that answer lines with lines: started, fed, watched and ended.

A worker is a module of kvlease run as a program. Its first line is its setup, each further line a
request, and it answers each with one line of JSON; it ends with its stdin. This module does not
know what is asked.
"""

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Generic, TypeVar, final

import msgspec
import trio
from attrs import frozen

import kvlease
from kvlease.errors import InternalError

A = TypeVar("A", bound=msgspec.Struct)


@frozen
class Crew(Generic[A]):
    """Workers of one kind, and their work.

    Attributes:
        module: run with ``python -m``.
        name: what an error calls a worker.
        setup: the first line of each.
        answer_type: what answers are decoded into.
        processes: most workers at a time.
    """

    module: str
    name: str
    setup: msgspec.Struct
    answer_type: type[A]
    processes: int

    async def run(self, requests: Sequence[msgspec.Struct], on_answer: Callable[[A], None]) -> None:
        """Share the requests out, and report each answer as it comes.

        Checkpoints: always; cancelled, it ends the processes.
        Raises InternalError when a worker dies; what it said is on stderr.
        """
        shared = iter(requests)
        async with trio.open_nursery() as nursery:
            for _ in range(min(self.processes, len(requests))):
                nursery.start_soon(self._drive, shared, on_answer)

    async def _drive(
        self, shared: Iterator[msgspec.Struct], on_answer: Callable[[A], None]
    ) -> None:
        home = str(Path(kvlease.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        # A session of its own keeps an interrupt at the terminal from reaching the worker; it ends
        # here, or with its stdin if this process is killed.
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", self.module],
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            worker = _Worker(process, self.name, self.answer_type)
            await worker.say(self.setup)
            for request in shared:
                await worker.say(request)
                on_answer(await worker.hear())
        except trio.BrokenResourceError as error:
            raise InternalError(f"{self.name} ended before it took its request") from error
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


@final
class _Worker(Generic[A]):
    """The near end of one worker process."""

    def __init__(self, process: trio.Process, name: str, answer_type: type[A]) -> None:
        self._process = process
        self._name = name
        self._decode = msgspec.json.Decoder(answer_type).decode
        self._received = bytearray()

    async def say(self, message: msgspec.Struct) -> None:
        """Send one line."""
        stdin = self._process.stdin
        assert stdin is not None, "workers are started with a pipe"
        await stdin.send_all(msgspec.json.encode(message) + b"\n")

    async def hear(self) -> A:
        """Receive one line."""
        stdout = self._process.stdout
        assert stdout is not None, "workers are started with a pipe"
        while b"\n" not in self._received:
            chunk = await stdout.receive_some()
            if not chunk:
                status = await self._process.wait()
                raise InternalError(f"{self._name} ended with status {status} before its answer")
            self._received += chunk
        line, _, rest = self._received.partition(b"\n")
        self._received = bytearray(rest)
        return self._decode(line)


@contextmanager
def answers_alone_on_stdout() -> Generator[Callable[[msgspec.Struct], None], None, None]:
    """The far end's way to answer: stdout becomes stderr, so that nothing else gets on the pipe.

    The block ends at an answer that nobody is left to hear.
    """
    pipe = os.dup(1)
    os.dup2(2, 1)

    def answer(message: msgspec.Struct) -> None:
        left = memoryview(msgspec.json.encode(message) + b"\n")
        while left:
            left = left[os.write(pipe, left) :]

    try:
        with suppress(BrokenPipeError):
            yield answer
    finally:
        os.close(pipe)
