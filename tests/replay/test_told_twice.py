"""A log that tells one transfer again and again is wrong, and is judged all the same."""

import msgspec

from kvlease.protocols.events import Event, LogClose, TransferDone, TransferPlan
from kvlease.services.replay.checker import check
from tests.mutants.plays import PLAYS, play


def test_transfers_of_one_number_that_took_equally_long_are_judged() -> None:
    """Found by a mutant: the slowest transfers were ranked by time and number, and both were equal.

    What an engine writes that begins a load twice.
    """
    *events, close = play(PLAYS["pressure"], 0)
    assert isinstance(close, LogClose)
    done = next(event for event in events if isinstance(event, TransferDone))
    plan = next(
        event
        for event in events
        if isinstance(event, TransferPlan) and event.transfer == done.transfer
    )
    again: list[Event] = []
    for _ in range(2):
        for event in (plan, done):
            seq = close.seq + len(again)
            again.append(msgspec.structs.replace(event, seq=seq, t_ns=close.t_ns))
    verdict = check([*events, *again])
    assert verdict.verdict == "violations"
    twice = [one for one in verdict.slowest_transfers if one.transfer == done.transfer]
    assert len(twice) >= 1
