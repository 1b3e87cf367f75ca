"""What the plays' logs are with every guard in place, so that a witness speaks of its mutant."""

import pytest

from kvlease.services.replay.checker import check
from tests.mutants.plays import PLAYS, play

SEEDS = 3


@pytest.mark.parametrize("name", PLAYS)
def test_every_log_of_a_play_is_clean(name: str, is_full: bool) -> None:
    """If one is not, replay names a rule that nobody broke, and every mutant would look seen."""
    for seed in range(10 * SEEDS if is_full else SEEDS):
        verdict = check(play(PLAYS[name], seed))
        assert verdict.verdict == "clean", (seed, verdict.violations[:2], verdict.cannot_tell[:2])
        assert verdict.event_counts["transfer.plan"] > 1
        assert verdict.event_counts["step.done"] > 1
