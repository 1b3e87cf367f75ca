"""The options of `kvlease race`, as data and as flags; loads neither torch nor trio."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final, get_args

from attrs import frozen

from kvlease.errors import BadInput
from kvlease.services.lab.explore_options import ExploreOptions, add_explore, explore_options
from kvlease.services.lab.race_jobs import Gate, IndexFormat, RowJob
from kvlease.services.options import MAX_SESSIONS, add_json

SESSIONS: Final = (8, 64, 80)
FORMATS: Final[tuple[IndexFormat, ...]] = get_args(IndexFormat)
GATES: Final[tuple[Gate, ...]] = get_args(Gate)
RACE: Final = """\
Show what the gate is for: the same tool-calling sessions, on a simulated device, with the
host cache off and on, with fp8 and bf16 index keys, and with the gate as it is (full), with
index keys granted before their bytes (kv-only), and with everything granted so (off). Every
answer is compared, tokens and logits, with a cold run of the same prompt. The gate cannot be
turned off; in the last two the device's completions lie, and the bytes come when the link
has really carried them. Exit status 1 only if a row with the full gate was corrupt, hung or
leaked. The whole table takes some minutes on two cores.

With --explore: run small scenarios of the real runtime under thousands of schedules instead.
"""
RACE_EXAMPLES: Final = """\
examples:
  kvlease race --json race.json           the whole table
  kvlease race --sessions 64 --index-k-format bf16 --log logs
      a part of it, and the event log of each row: logs/host-bf16-kv-only-64.kvlog
  kvlease replay logs/host-bf16-kv-only-64.kvlog
      find the reads that came early in it; --rerun gives the same wrong answers again
  kvlease race --explore --schedules 10000
      look for an order of tasks that breaks something
"""


_TABLE_FLAGS: Final = ("sessions", "index_k_format", "gate")
_EXPLORE_FLAGS: Final = ("scenario", "schedules", "policy", "choices")


@frozen
class RaceOptions:
    """Which rows, and where results go. Raises BadInput."""

    sessions: tuple[int, ...] = SESSIONS
    formats: tuple[IndexFormat, ...] = FORMATS
    gates: tuple[Gate, ...] = GATES
    seed: int = 0
    log: str | None = None
    json: str | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot be run."""
        for count in self.sessions:
            if not 1 <= count <= MAX_SESSIONS:
                raise BadInput(f"--sessions has {count}; give numbers from 1 to {MAX_SESSIONS}")
        if self.seed < 0:
            raise BadInput(f"--seed is {self.seed}; give 0 or more")
        if self.log is not None and Path(self.log).exists() and not Path(self.log).is_dir():
            raise BadInput(f"--log {self.log} is a file; give a folder, each row has a log")

    def jobs(self) -> list[RowJob]:
        """List the rows in the order of the table."""
        return [
            RowJob(
                host_cache=host_cache,
                index_k_format=index_k_format,
                gate=gate,
                sessions=sessions,
            )
            for host_cache in (False, True)
            for index_k_format in self.formats
            for gate in self.gates
            for sessions in self.sessions
        ]


def add_race(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    table = parser.add_argument_group("the table's rows (the host cache is off and on in each)")
    table.add_argument(
        "--sessions",
        action="append",
        metavar="N[,N...]",
        help="how many sessions are served at a time; may be repeated (default: "
        f"{','.join(map(str, SESSIONS))})",
    )
    table.add_argument(
        "--index-k-format",
        action="append",
        choices=FORMATS,
        metavar="F",
        help=f"how index keys are stored: {', '.join(FORMATS)}; may be repeated (default: both)",
    )
    table.add_argument(
        "--gate",
        action="append",
        choices=GATES,
        metavar="G",
        help=f"one of {', '.join(GATES)}; may be repeated (default: all)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", default=0, help="of weights, sessions and schedules"
    )
    parser.add_argument(
        "--log",
        metavar="DIR",
        help="write the event log of each row into this folder (with --choices: into this file)",
    )
    add_json(parser)
    add_explore(parser)


def race_options(space: argparse.Namespace) -> RaceOptions | ExploreOptions:
    """Read the options from what argparse found; raises BadInput."""
    foreign = _TABLE_FLAGS if space.explore else _EXPLORE_FLAGS
    for name in foreign:
        if getattr(space, name) is not None:
            flag = name.replace("_", "-")
            where = "the table; drop --explore" if space.explore else "exploration; add --explore"
            raise BadInput(f"--{flag} belongs to {where}, or drop the flag")
    if space.explore:
        return explore_options(space)
    return RaceOptions(
        sessions=_counts(space.sessions) or SESSIONS,
        formats=tuple(dict.fromkeys(space.index_k_format or FORMATS)),
        gates=tuple(dict.fromkeys(space.gate or GATES)),
        seed=space.seed,
        log=space.log,
        json=space.json,
    )


def _counts(texts: list[str] | None) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for text in ",".join(texts or ()).split(",") if texts else ():
        if not text.strip().isdecimal():
            raise BadInput(f"--sessions takes numbers divided by commas; '{text}' is none")
        found[int(text)] = None
    return tuple(found)
