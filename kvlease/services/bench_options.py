"""The options of `kvlease bench`, as data and as flags; loads neither torch nor trio."""

from __future__ import annotations

import argparse
from typing import Final, Literal, get_args

from attrs import frozen

from kvlease.services.options import add_json

Group = Literal["ceilings", "gate", "copy", "overlap", "kernels", "serve"]
GROUPS: Final[tuple[Group, ...]] = get_args(Group)
BENCH: Final = """\
Measure the product on this machine. The machine's own ceilings come first (device copy,
matmul, pinned copies across the link), and every figure stands beside the share of them that
it reaches. Peers' kernels are timed in turns with ours if their packages are installed, and
skipped with a word if not. Without a CUDA device the groups that need one are skipped.

groups: ceilings; gate (what the rule costs in a step); copy (pages across the link); overlap
(copies beside compute); kernels (each beside its peer and its roofline); serve (whole answers).
"""
BENCH_EXAMPLES: Final = """\
examples:
  kvlease bench                                  everything that this machine can do
  kvlease bench kernels --lines kernels.jsonl    one group; a line a figure as it comes
  kvlease bench --json bench.json                one object with versions and ceilings
"""


@frozen
class BenchOptions:
    """Which groups, and where figures go."""

    groups: tuple[Group, ...] = GROUPS
    json: str | None = None
    lines: str | None = None


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of `bench`."""
    parser.add_argument(
        "groups",
        nargs="*",
        type=_group,
        metavar="GROUP",
        help=f"what to measure: {', '.join(GROUPS)} (default: all)",
    )
    parser.add_argument(
        "--lines", metavar="FILE", help="write each figure as a JSON line as soon as it is there"
    )
    add_json(parser)


def _group(word: str) -> Group:
    for group in GROUPS:
        if group == word:
            return group
    raise argparse.ArgumentTypeError(f"{word} is no group; give any of {', '.join(GROUPS)}")


def bench_options(space: argparse.Namespace) -> BenchOptions:
    """Read the flags."""
    asked: list[Group] = space.groups
    chosen: tuple[Group, ...] = tuple(group for group in GROUPS if group in asked)
    return BenchOptions(chosen or GROUPS, space.json, space.lines)
