"""What must be true in every state, by rule; asked of the world itself, through no guard.

R9 is about ways on from a state and is checked by `explore.py` with a backward pass.
"""

from collections.abc import Iterator

from tests.rules.sequences import promised
from tests.rules.state import (
    ENDING,
    EXCLUSIVE,
    FREE,
    GONE,
    IDLE,
    LAUNCHED,
    LAYER_COPIES,
    LOST,
    NO_GRANT,
    NONE,
    ORPHAN,
    OWNING,
    PLANNED,
    PLANNED_OUT,
    QUARANTINED,
    SEALED,
    SPOILED,
    STRAY,
    WHOLE,
    WRONG,
    Size,
    State,
)


def breach(size: Size, state: State) -> str | None:
    """Return the first rule that a state breaks, with a sentence; None if it breaks none."""
    return next(_breaches(size, state), None)


def _breaches(size: Size, state: State) -> Iterator[str]:
    yield from _of_readers(state)
    yield from _of_the_writer(state)
    yield from _of_transfers(state)
    yield from _of_the_remote(state)
    yield from _of_pages(size, state)


def _is_planned(state: State, fill: int, layer: int) -> bool:
    transfer = state.transfers[fill] if fill >= 0 else None
    return transfer is not None and any(transfer.copies[i] == PLANNED for i in LAYER_COPIES[layer])


def _of_readers(state: State) -> Iterator[str]:
    for reader in state.readers:
        if reader.phase == IDLE:
            continue
        if reader.phase == WRONG:
            yield "R2: a reader has published what was not there when it read"
            continue
        at = state.pages[reader.page].state
        for layer in range(reader.run, reader.opened):
            if _is_planned(state, reader.fill, layer):
                yield "R1: a layer is open whose copy is only planned"
        if reader.opened > reader.run and _is_reused(at, reader.age):
            yield "R6: a page is reused under a read that was launched"
        if reader.phase == ORPHAN:
            continue
        if not reader.age and at in (FREE, QUARANTINED):
            yield "R8: a reference to a released page passes for current"
        elif not reader.age and at != SEALED:
            yield "R4: a sealed page that somebody reads is sealed no more"
        elif reader.age and at != QUARANTINED:
            yield "R6: a leased page has left quarantine"
        elif reader.age and reader.fill != LOST:
            yield "R6: a leased page was released although nothing was lost"


def _is_reused(at: int, age: int) -> bool:
    """Whether a page is not what a reference meant any more, nor waiting in quarantine."""
    return at in (FREE, EXCLUSIVE) or (age > 0 and at != QUARANTINED)


def _of_the_writer(state: State) -> Iterator[str]:
    writer = state.writer
    if writer.phase == SPOILED:
        yield "R2: a page was sealed that was computed from bytes that were not there"
    if writer.phase == STRAY and (writer.own_age or state.pages[writer.own].state != EXCLUSIVE):
        yield "R6: a page was released under a write that was launched"
    if OWNING <= writer.phase <= ENDING:
        if writer.own_age or state.pages[writer.own].state != EXCLUSIVE:
            yield "R3: the page being written is not its writer's alone"
        if writer.phase == LAUNCHED and any(
            _is_planned(state, writer.fill, layer) for layer in (0, 1)
        ):
            yield "R1: a layer is open whose copy is only planned"
    if writer.page != NONE and IDLE < writer.phase <= ENDING:
        at = state.pages[writer.page].state
        if writer.phase in (LAUNCHED, ENDING) and _is_reused(at, writer.age):
            yield "R6: a page is reused under a read that was launched"
        if not writer.age and at in (FREE, QUARANTINED):
            yield "R8: a reference to a released page passes for current"
        elif writer.age and at != QUARANTINED:
            yield "R6: a leased page has left quarantine"


def _of_transfers(state: State) -> Iterator[str]:
    for slot, transfer in enumerate(state.transfers):
        if transfer is None:
            continue
        source, target = state.pages[transfer.source], state.pages[transfer.target]
        if transfer.running != NONE and target.state != QUARANTINED:
            if transfer.target_age or target.state != SEALED:
                yield "R6: a copy writes a page that is somebody else's by now"
            elif target.fill != slot:
                yield "R4: a copy writes a page that shows as arrived"
        if transfer.stage == GONE and transfer.running == NONE:
            continue
        # Once the end is told what is left to hold the ends for are copies that still run.
        rule = "R7: {} of a transfer is not held to its end"
        if transfer.stage != PLANNED_OUT:
            rule = "R6: {} of a transfer that has ended is let go before its copies have returned"
        if source.state != QUARANTINED and (transfer.source_age or source.state != SEALED):
            yield rule.format("the source")
        if target.state != QUARANTINED and (transfer.target_age or target.state != SEALED):
            yield rule.format("the target")
        if target.state == QUARANTINED and not transfer.target_age:
            yield "R8: a reference to a released page passes for current"


def _of_the_remote(state: State) -> Iterator[str]:
    remote = state.remote
    if remote.is_alien:
        yield "R8: a write is let in that was sent under a grant that has ended"
    if remote.grant != NO_GRANT and (remote.age or state.pages[remote.page].state != EXCLUSIVE):
        late = "a remote write is in the air" if remote.air != NONE else "a writer may yet write"
        yield f"R6: a granted page was let go while {late}"


def _of_pages(size: Size, state: State) -> Iterator[str]:
    holders = [0] * size.num_pages
    writer, remote = state.writer, state.remote
    if OWNING <= writer.phase <= ENDING:
        holders[writer.own] += 1
    if remote.grant != NO_GRANT:
        holders[remote.page] += 1
    for place, page in enumerate(state.pages):
        if holders[place] > 1:
            yield "R3: a page has two exclusive holders"
        if holders[place] != (page.state == EXCLUSIVE) and writer.phase < SPOILED:
            yield "R11: a page's state and its holders disagree"
        if page.state == SEALED and page.fill == NONE and page.bits != WHOLE:
            yield "R5: a page shows as arrived without all its bytes"
        if page.blockers and page.state != QUARANTINED:
            yield "R6: a page left quarantine before what may touch it has ended"
        if page.fill != NONE and not _is_filled(state, place, page.fill):
            yield "R7: a page shows as loading and nothing is filling it"
    free = sum(page.state == FREE for page in state.pages[: size.device_pages])
    if promised(state) > free:
        yield "R11: more pages are promised than are free"


def _is_filled(state: State, place: int, slot: int) -> bool:
    transfer = state.transfers[slot]
    return transfer is not None and transfer.target == place


def is_quiet(state: State) -> bool:
    """Whether everything has ended: nobody holds, moves or waits, nothing is in quarantine."""
    return (
        all(reader.phase == IDLE for reader in state.readers)
        and state.writer.phase == IDLE
        and all(transfer is None for transfer in state.transfers)
        and state.remote.grant == NO_GRANT
        and all(page.state in (FREE, SEALED) and page.fill == NONE for page in state.pages)
    )
