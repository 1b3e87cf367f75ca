"""Scratch copies of the tree, in which one guard at a time is missing."""

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import trio

from tests.mutants.mutant import ROOT, Mutant

TREE = ("kvlease", "tests", "examples", "pyproject.toml", ".mypy_cache")
"""What a copy has; mypy's memory of the tree, where there is one, saves it half a minute."""


UNDER_WAY = shutil.ignore_patterns("*.pyc.*", "*.db-*")
"""What other processes of a test run write and take away again while a copy is made."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended, or was ended at its time limit (``status`` is None)."""

    status: int | None
    output: str


@dataclass(frozen=True)
class Scratch:
    """One copy of the tree. Everything that runs in it imports its own kvlease."""

    path: Path

    async def run(self, command: Sequence[str], limit_s: float) -> Ended:
        """Run a command of this interpreter's (``-m pytest ...``) in the copy, to its end."""
        with trio.move_on_after(limit_s):
            done = await trio.run_process(
                [sys.executable, *command],
                cwd=self.path,
                env=self._env(),
                capture_stdout=True,
                stderr=subprocess.STDOUT,
                check=False,
            )
            return Ended(done.returncode, done.stdout.decode())
        return Ended(None, "")

    @asynccontextmanager
    async def lines_of(self, command: Sequence[str]) -> AsyncGenerator[AsyncIterator[str]]:
        """Run a command, as `run` does, for a block that reads its lines; it ends with the block.

        What it writes to standard error is dropped.
        """
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    [sys.executable, *command],
                    cwd=self.path,
                    env=self._env(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    check=False,
                )
            )
            assert process.stdout is not None, "a pipe was asked for"
            yield _lines(process.stdout)
            nursery.cancel_scope.cancel()

    def _env(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(self.path),
            "PYTHONDONTWRITEBYTECODE": "1",  # it would be of a file that is about to be put back
            "OMP_NUM_THREADS": "1",
        }

    @contextmanager
    def without_guard(self, mutant: Mutant) -> Generator[None]:
        """Take the mutant's guard out for the block."""
        file = self.path / mutant.file
        source, times = file.read_text(), file.stat()
        file.write_text(mutant.apply(source))
        try:
            yield
        finally:
            file.write_text(source)
            # Its compiled form is known by this time, and serves again.
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


async def _lines(stream: trio.abc.ReceiveStream) -> AsyncIterator[str]:
    rest = b""
    async for chunk in stream:
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            yield line.decode()


@contextmanager
def open_scratch() -> Generator[Scratch]:
    """Copy the tree into a temporary folder, which goes with the block."""
    with TemporaryDirectory(prefix="kvlease-mutants-") as folder:
        for name in TREE:
            source, target = ROOT / name, Path(folder, name)
            if source.is_dir():
                # Compiled files too: they save their making.
                shutil.copytree(source, target, ignore=UNDER_WAY)
            elif source.exists():
                shutil.copy2(source, target)
        yield Scratch(Path(folder))
