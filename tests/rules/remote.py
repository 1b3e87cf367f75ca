"""What a remote writer does, through a write grant, and what the network does to it."""

from collections.abc import Iterator

from tests.rules.rulebook import Kind, Rulebook, Step, all_stepped, put, stepped
from tests.rules.sequences import can_promise
from tests.rules.state import (
    DONE,
    EXPIRED,
    NO_GRANT,
    NONE,
    NUM_COPIES,
    OPEN,
    PLANNED,
    Message,
    Remote,
    Size,
    State,
)

START, FAULT, PROGRESS = Kind.START, Kind.FAULT, Kind.PROGRESS


def remote_steps(rules: Rulebook, size: Size, state: State) -> Iterator[Step]:
    """Everything the peer, its connection and the grant book may do now."""
    remote = state.remote
    if remote.grant == NO_GRANT:
        if can_promise(rules, size, state):
            for place in range(size.device_pages):
                taken = rules.acquire(state, place)
                if taken is not None:
                    granted = Remote(OPEN, place, 0, (PLANNED,) * NUM_COPIES)
                    yield ("grant is issued", place), START, taken._replace(remote=granted)
        return
    if remote.air != NONE:
        yield from _lands(rules, state)
    elif remote.grant == OPEN and remote.is_alive:
        yield from _sends(rules, state)
    if remote.grant == OPEN and rules.layers(remote.copies)[-1] != DONE:
        yield ("grant expires",), PROGRESS, _expired(rules, state)
    if remote.is_alive:
        if remote.grant == EXPIRED and remote.air == NONE:
            yield ("peer says it has stopped",), PROGRESS, _stopped(rules, state)
        yield from _faults(size, state)
    elif rules.guards.connection_end_stops:
        ended = _stopped(rules, state)
        message = ended.message._replace(is_older_life=1) if ended.message.is_dead else Message()
        yield ("peer's connection ends",), PROGRESS, ended._replace(message=message)


def _sends(rules: Rulebook, state: State) -> Iterator[Step]:
    """The peer writes component after component, and says when it is through."""
    remote = state.remote
    index = next((i for i, code in enumerate(remote.copies) if code == PLANNED), None)
    if index is not None:
        copies = stepped(remote.copies, index, rules.records)
        if copies is not None and rules.guards.accepts(True, True, True):
            sent = remote._replace(copies=copies, air=index)
            yield ("peer writes", index), PROGRESS, state._replace(remote=sent)
    if rules.layers(remote.copies)[-1] == DONE:
        sealed = rules.seal(state, remote.page)
        if sealed is not None:
            yield ("peer is through",), PROGRESS, _over(sealed)


def _lands(rules: Rulebook, state: State) -> Iterator[Step]:
    remote = state.remote
    index, page = remote.air, state.pages[remote.page]
    copies = stepped(remote.copies, index, rules.finishes) or remote.copies
    there = put(state, remote.page, page._replace(bits=page.bits | 1 << index))
    landed = remote._replace(copies=copies, air=NONE)
    yield ("peer's write lands", index), PROGRESS, there._replace(remote=landed)
    short = stepped(remote.copies, index, rules.shortens)
    if short is not None:
        torn = remote._replace(copies=short, air=NONE)
        yield ("peer's write lands short", index), FAULT, state._replace(remote=torn)


def _expired(rules: Rulebook, state: State) -> State:
    remote = state.remote
    copies = all_stepped(remote.copies, rules.revokes)
    state = state._replace(remote=remote._replace(grant=EXPIRED, copies=copies))
    if rules.guards.grant_held_until_stopped:
        return state
    return rules.release(state, remote.page) or state


def _stopped(rules: Rulebook, state: State) -> State:
    """The writer is known to have stopped: its pages come back (R6)."""
    return _over(rules.release(state, state.remote.page) or state)


def _over(state: State) -> State:
    message = state.message
    if message.page != NONE:
        message = message._replace(is_dead=1)
    return state._replace(remote=Remote(), message=message)


def _faults(size: Size, state: State) -> Iterator[Step]:
    remote, message = state.remote, state.message
    if size.has_deaths:
        yield ("peer dies",), FAULT, state._replace(remote=remote._replace(is_alive=0))
    if remote.grant == OPEN and message.page == NONE:
        held_back = Message(remote.page, remote.age)
        yield ("network holds a write back",), FAULT, state._replace(message=held_back)


def message_steps(rules: Rulebook, state: State) -> Iterator[Step]:
    """The network delivers a write that it held back, under whatever grant there is now.

    Harsh on purpose: grants are told apart by incarnation and epochs alone, as if their ids came
    round again; and what another life of the peer knew may have today's numbers.
    """
    message, remote = state.message, state.remote
    if not message.is_dead or remote.air != NONE:
        return
    is_same_page = message.page == remote.page
    if remote.grant != NO_GRANT and (is_same_page or message.is_older_life):
        same_epochs = message.age == 0 or bool(message.is_older_life)
        is_open = remote.grant == OPEN
        if rules.guards.accepts(is_open, not message.is_older_life, same_epochs):
            alien = remote._replace(air=0, is_alien=1)
            let_in = state._replace(remote=alien, message=Message())
            yield ("late write is let in",), FAULT, let_in
            return
    yield ("late write is refused",), FAULT, state._replace(message=Message())
