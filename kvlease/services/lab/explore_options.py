"""The options of `kvlease race --explore`, as data and as flags; loads neither torch nor trio."""

from __future__ import annotations

import argparse
from typing import Final

from attrs import frozen

from kvlease.errors import BadInput

SCENARIO_NAMES: Final = ("pressure", "abort", "shared", "preempt", "keeping")
"""The core scenarios, in the order in which they are explored."""
MAX_SCHEDULES: Final = 10_000_000


@frozen
class ExploreOptions:
    """What to explore. ``choices`` replays one run of one scenario instead. Raises BadInput."""

    scenarios: tuple[str, ...] = SCENARIO_NAMES
    schedules: int = 500
    """Of each scenario."""
    seed: int = 0
    """The first seed; each schedule takes the next."""
    policy: str = "mixed"
    choices: str | None = None
    log: str | None = None
    json: str | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse what means nothing, naming the flag."""
        for name in self.scenarios:
            if name not in SCENARIO_NAMES:
                raise BadInput(
                    f"--scenario {name} is not known; give one of {', '.join(SCENARIO_NAMES)}"
                )
        if not 1 <= self.schedules <= MAX_SCHEDULES:
            raise BadInput(
                f"--schedules is {self.schedules}; give a number from 1 to {MAX_SCHEDULES}"
            )
        if self.seed < 0:
            raise BadInput(f"--seed is {self.seed}; give 0 or more")
        if self.choices is not None and len(self.scenarios) != 1:
            raise BadInput("--choices replays one run; say of which with --scenario NAME")
        if self.log is not None and self.choices is None:
            raise BadInput("--log with --explore is for the one run that --choices replays")


_DEFAULTS: Final = ExploreOptions()


def add_explore(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only exploration takes; ``--seed``, ``--log``, ``--json`` are race's."""
    group = parser.add_argument_group("exploration of schedules (--explore)")
    group.add_argument(
        "--explore",
        action="store_true",
        help="run small scenarios of the real runtime under many schedules instead of the table",
    )
    group.add_argument(
        "--scenario",
        action="append",
        choices=SCENARIO_NAMES,
        metavar="NAME",
        help=f"one of {', '.join(SCENARIO_NAMES)}; may be repeated (default: all)",
    )
    group.add_argument(
        "--schedules",
        type=int,
        metavar="N",
        help="schedules of each scenario, one a seed from --seed on (default: "
        f"{_DEFAULTS.schedules})",
    )
    group.add_argument(
        "--policy",
        metavar="P",
        help="mixed; random: any runnable task next; pct:N: random priorities that change N-1 "
        f"times (default: {_DEFAULTS.policy})",
    )
    group.add_argument(
        "--choices",
        metavar="C",
        help="replay the run of --scenario and --seed that a failure has printed",
    )


def explore_options(space: argparse.Namespace) -> ExploreOptions:
    """Read the options from what argparse found; raises BadInput."""
    return ExploreOptions(
        scenarios=tuple(space.scenario or SCENARIO_NAMES),
        schedules=_DEFAULTS.schedules if space.schedules is None else space.schedules,
        seed=space.seed,
        policy=space.policy or _DEFAULTS.policy,
        choices=space.choices,
        log=space.log,
        json=space.json,
    )
