"""`python -m tests.mutants [ID ...] [--jobs N] [--witness]`: take guards out, one at a time.

Each mutant runs in a scratch copy of the tree and has to be caught by what the list names. With
``--witness`` replay, its code whole, has to name the rule that broke from the log of a run.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import trio

from tests.mutants.hunt import LIMIT_S, Caught, Seen, hunt, pytest_command, see, types_command
from tests.mutants.mutant import MUTANTS, Mutant, Types, Witness, tests_of
from tests.mutants.scratch import Scratch, open_scratch


@dataclass(frozen=True)
class Row:
    """What became of one mutant."""

    mutant: Mutant
    caught: Caught
    seen: Seen | None
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether it was killed, and seen in the log where it should be."""
        return self.caught.is_killed and (self.seen is None or self.seen.rule is not None)

    def lines(self) -> list[str]:
        """Return what to print."""
        one, end = self.mutant, "killed" if self.caught.is_killed else "SURVIVED"
        first = f"{end:8} {one.rule:3} {one.by.kind:5} {self.seconds:5.1f} s  {one.id:64} "
        lines = [first + one.by.how]
        if not self.caught.is_killed:
            lines.append(f"{'':26}{self.caught.why_not}")
        if self.seen is not None:
            lines.append(f"{'':26}log: {self.seen.rule or 'NOT SEEN'}, {self.seen.text}")
        elif one.no_witness:
            lines.append(f"{'':26}log: none: {one.no_witness}")
        return lines


async def try_one(scratch: Scratch, mutant: Mutant, *, witness: bool) -> Row:
    """Take one guard out and see what notices."""
    began = time.monotonic()
    with scratch.without_guard(mutant):
        caught = await hunt(scratch, mutant)
        seconds = time.monotonic() - began
        seen = None
        if witness and mutant.witness is not None:
            seen = await see(scratch, mutant.witness)
    return Row(mutant, caught, seen, seconds)


async def check_whole(scratch: Scratch, mutants: Sequence[Mutant], *, witness: bool) -> list[str]:
    """Say what is wrong with the tree as it is: everything named has to pass while it is whole."""
    wrong: list[str] = []
    tests = tests_of(mutants)
    if tests:
        ended = await scratch.run(pytest_command(*tests), LIMIT_S + 10 * len(tests))
        if ended.status != 0:
            wrong.append(f"the tests named fail with every guard in place:\n{ended.output}")
    for by in {one.by for one in mutants if isinstance(one.by, Types)}:
        ended = await scratch.run(types_command(by), LIMIT_S)
        if ended.status != 0:
            wrong.append(f"{by.how} fails with every guard in place:\n{ended.output}")
    every_rule = (*(f"R{number}" for number in range(1, 15)),)
    runs = {(it.play, it.first, it.seeds) for one in mutants if (it := one.witness) is not None}
    for play, first, seeds in sorted(runs) if witness else ():
        seen = await see(scratch, Witness(play, every_rule, first, seeds))
        if seen.rule is not None:
            wrong.append(f"replay finds {seen.rule} broken with every guard in place: {seen.text}")
    return wrong


async def try_all(mutants: Sequence[Mutant], jobs: int, *, witness: bool) -> bool:
    """Try the mutants, so many at a time, printing each row; return whether all is well."""
    rows: list[Row] = []
    wrong: list[str] = []
    todo = iter(mutants)

    async def worker(scratch: Scratch, number: int) -> None:
        if number == 0:
            wrong.extend(await check_whole(scratch, mutants, witness=witness))
        for mutant in todo:
            row = await try_one(scratch, mutant, witness=witness)
            rows.append(row)
            print("\n".join(row.lines()), flush=True)

    with ExitStack() as stack:
        async with trio.open_nursery() as nursery:
            for number in range(jobs):
                scratch = stack.enter_context(open_scratch())
                nursery.start_soon(worker, scratch, number)
    killed = sum(row.caught.is_killed for row in rows)
    print(f"\n{killed} of {len(rows)} killed", end="")
    if witness:
        logged = [row for row in rows if not isinstance(row.mutant.by, Types)]
        named = sum(row.seen is not None and row.seen.rule is not None for row in logged)
        print(f"; replay names the rule of {named} of the {len(logged)} that the types let", end="")
    print("\n" + "\n".join(wrong))
    return not wrong and all(row.is_good for row in rows)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; 0 if every mutant was caught, 1 if not, 2 if there is no such one."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID", help="a mutant, or words of its id")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--witness", action="store_true", help="replay has to see it in a log")
    options = parser.parse_args(arguments)
    ids: list[str] = options.ids
    mutants = [one for one in MUTANTS if not ids or any(words in one.id for words in ids)]
    if not mutants:
        print(f"no mutant is called {' or '.join(ids)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    status = 130
    try:
        is_well = trio.run(partial(try_all, mutants, options.jobs, witness=options.witness))
        status = 0 if is_well else 1
    except* KeyboardInterrupt:
        print("interrupted; the scratch copies are gone", file=sys.stderr)
    print(f"in {time.monotonic() - began:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
