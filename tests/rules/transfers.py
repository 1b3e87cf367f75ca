"""What transfers and the pools do: plan, record, copy, end, report, settle, evict, reclaim."""

from collections.abc import Iterator

from tests.rules.rulebook import Kind, Rulebook, Step, all_stepped, put, stepped, unblocked
from tests.rules.sequences import can_promise
from tests.rules.state import (
    DONE,
    FAILED,
    GONE,
    LAYER_COPIES,
    LOAD,
    LOST,
    NONE,
    NUM_COPIES,
    PLANNED,
    PLANNED_OUT,
    QUARANTINED,
    REPORTED,
    SEALED,
    STORE,
    Reader,
    Size,
    State,
    Transfer,
    Writer,
)

START, FAULT, PROGRESS = Kind.START, Kind.FAULT, Kind.PROGRESS


def pool_steps(rules: Rulebook, size: Size, state: State) -> Iterator[Step]:
    """Plan a load or a store in each free slot, evict, and reclaim."""
    for place, page in enumerate(state.pages):
        if page.state == SEALED:
            twin_fill = NONE if page.twin == NONE else state.pages[page.twin].fill
            in_flight = page.fill != NONE or twin_fill != NONE
            if rules.guards.may_evict(rules.is_pinned(state, place), in_flight):
                released = rules.release(state, place)
                if released is not None:
                    yield ("pool evicts", place), START, released
        elif page.state == QUARANTINED:
            freed = rules.reclaim(state, place)
            if freed is not None:
                yield ("pool reclaims", place), PROGRESS, freed
    if None in state.transfers:
        slot = state.transfers.index(None)
        device, host = range(size.device_pages), range(size.device_pages, size.num_pages)
        if size.loads and can_promise(rules, size, state):
            yield from _plans(rules, state, slot, LOAD, host, device)
        if size.stores:
            yield from _plans(rules, state, slot, STORE, device, host)


def _plans(
    rules: Rulebook, state: State, slot: int, kind: int, sources: range, targets: range
) -> Iterator[Step]:
    """Take both ends: the source is pinned by the transfer, the target shows as loading (R7)."""
    name = "plan load" if kind == LOAD else "plan store"
    for source in sources:
        page = state.pages[source]
        if page.state != SEALED or page.fill != NONE or page.twin != NONE:
            continue
        for target in targets:
            taken = rules.acquire(state, target)
            sealed = None if taken is None else rules.seal(taken, target, slot)
            if sealed is None:
                continue
            both = put(sealed, target, sealed.pages[target]._replace(twin=source))
            both = put(both, source, both.pages[source]._replace(twin=target))
            transfer = Transfer(kind, source, 0, target, 0, (PLANNED,) * NUM_COPIES)
            yield (name, slot, source, target), START, _with(both, slot, transfer)


def _with(state: State, slot: int, transfer: Transfer | None) -> State:
    others = state.transfers
    after = (*others[:slot], transfer, *others[slot + 1 :])
    return State(state.pages, state.readers, state.writer, after, state.remote, state.message)


def transfer_steps(rules: Rulebook, size: Size, state: State, slot: int) -> Iterator[Step]:
    """Everything that can happen to one transfer now."""
    transfer = state.transfers[slot]
    assert transfer is not None, "asked for slots that are taken"
    whole = rules.whole(transfer)
    is_final = whole >= DONE
    if transfer.running != NONE:
        yield from _returns(rules, state, slot)
    elif rules.begins[whole]:
        yield from _begins(rules, state, slot)
    if not is_final:
        yield from _records(rules, state, slot)
        if rules.guards.has_deadline:
            revoked = all_stepped(transfer.copies, rules.revokes)
            late = _with(state, slot, transfer._replace(copies=revoked))
            yield ("transfer is late or revoked", slot), PROGRESS, late
        if size.has_deaths and not transfer.is_stuck:
            stuck = _with(state, slot, transfer._replace(is_stuck=1))
            yield ("transfer's loader dies", slot), FAULT, stuck
    elif transfer.stage == PLANNED_OUT:
        yield ("transfer's end is told", slot), PROGRESS, _reported(rules, state, slot, whole)
    elif transfer.stage == REPORTED:
        is_told = whole == DONE or rules.guards.settling_is_told
        is_running = transfer.running != NONE
        if is_told and rules.settles[whole, is_running]:
            settled = _settled(rules, state, slot, whole)
            yield ("transfer settles", slot), PROGRESS, settled


def _records(rules: Rulebook, state: State, slot: int) -> Iterator[Step]:
    """A layer's copies are in their stream's order; those begun meanwhile are recorded already."""
    transfer = state.transfers[slot]
    assert transfer is not None
    if transfer.is_stuck:
        return
    for layer, mine in enumerate(LAYER_COPIES):
        copies = transfer.copies
        if any(copies[i] == PLANNED for i in mine):
            for i in mine:
                copies = stepped(copies, i, rules.records) or copies
            after = _with(state, slot, transfer._replace(copies=copies))
            yield ("transfer records layer", slot, layer), PROGRESS, after
            return


def _begins(rules: Rulebook, state: State, slot: int) -> Iterator[Step]:
    """The stream's worker begins the next copy; being run proves the order (R2)."""
    transfer = state.transfers[slot]
    assert transfer is not None
    copies = transfer.copies
    index = next((i for i, code in enumerate(copies) if code != DONE), None)
    if index is None or (transfer.is_stuck and copies[index] == PLANNED):
        return
    early = stepped(copies, index, rules.finishes)
    if copies[index] == PLANNED and early is not None:
        # Only where the machine lets work end that nobody has recorded.
        claimed = _with(state, slot, transfer._replace(copies=early))
        yield ("copy is said to have ended", slot, index), FAULT, claimed
    if copies[index] == PLANNED:
        copies = stepped(copies, index, rules.records) or copies
    begun = _with(state, slot, transfer._replace(copies=copies, running=index))
    target = state.pages[transfer.target]
    torn = put(begun, transfer.target, target._replace(bits=target.bits & ~(1 << index)))
    yield ("copy begins", slot, index), PROGRESS, torn


def _returns(rules: Rulebook, state: State, slot: int) -> Iterator[Step]:
    """The running copy has returned, with all its bytes or with fewer (R5)."""
    transfer = state.transfers[slot]
    assert transfer is not None
    index = transfer.running
    source, target = state.pages[transfer.source], state.pages[transfer.target]
    bit = source.bits & (1 << index)
    moved = put(state, transfer.target, target._replace(bits=target.bits | bit))
    copies = stepped(transfer.copies, index, rules.finishes) or transfer.copies
    back = None if transfer.stage == GONE else transfer._replace(copies=copies, running=NONE)
    yield ("copy returns", slot, index), PROGRESS, _with(moved, slot, back)
    short = stepped(transfer.copies, index, rules.shortens)
    if short is not None:
        if short[index] != DONE:
            short = all_stepped(short, rules.fails)
        back = transfer._replace(copies=short, running=NONE)
        yield ("copy returns short", slot, index), FAULT, _with(state, slot, back)


def _reported(rules: Rulebook, state: State, slot: int, whole: int) -> State:
    """The pools hear of the end: what arrived is ready, what was lost is nobody's (R5, R6)."""
    transfer = state.transfers[slot]
    assert transfer is not None
    # How far each copy had come, and why no more would, matters to nobody from here on.
    ended = transfer._replace(copies=(whole,) * NUM_COPIES, is_stuck=0, stage=REPORTED)
    state = _with(state, slot, ended)
    is_lost = whole != DONE
    if not is_lost:
        target = state.pages[transfer.target]
        state = put(state, transfer.target, target._replace(fill=NONE))
    else:
        drops_source = whole == FAILED and transfer.kind == LOAD
        blockers = _blockers_of_lost(rules, state, slot)
        if drops_source:
            # An earlier load of the same page that was late may still be reading it.
            blockers |= _other_loads(rules, state, slot)
        state = rules.release(state, transfer.target, blockers) or state
        if drops_source and state.pages[transfer.source].state == SEALED:
            # Its bytes may be to blame: they are not tried for ever.
            state = rules.release(state, transfer.source, blockers) or state
    return _told(state, slot, LOST if is_lost else NONE)


def _other_loads(rules: Rulebook, state: State, slot: int) -> int:
    if not rules.guards.dropped_waits_for_loads:
        return 0
    others = (other for other, one in enumerate(state.transfers) if one and one.kind == LOAD)
    return sum(1 << other for other in others if other != slot)


def _blockers_of_lost(rules: Rulebook, state: State, slot: int) -> int:
    blockers = (1 << slot) if rules.guards.lost_waits_for_copies else 0
    if rules.guards.lost_waits_for_readers:
        for i, reader in enumerate(state.readers):
            blockers |= rules.reader_bits[i] if reader.fill == slot else 0
        blockers |= rules.writer_bit if state.writer.fill == slot else 0
    return blockers


def _told(state: State, slot: int, fill: int) -> State:
    """Whoever leased from the transfer knows now how it ended.

    What was lost is published by nobody: of its readers only the number of reads that have yet to
    run matters from here on.
    """
    readers: list[Reader] = []
    for one in state.readers:
        if one.fill != slot:
            readers.append(one)
        elif fill == LOST:
            readers.append(one._replace(fill=LOST, opened=one.opened - one.run, run=0, is_bad=0))
        else:
            readers.append(one._replace(fill=fill))
    writer: Writer = state.writer
    if writer.fill == slot:
        writer = writer._replace(fill=fill)
    return state._replace(readers=tuple(readers), writer=writer)


def _settled(rules: Rulebook, state: State, slot: int, whole: int) -> State:
    """Both ends are let go."""
    transfer = state.transfers[slot]
    assert transfer is not None
    is_about = transfer.running != NONE or (whole != DONE and rules.begins[whole])
    left = transfer._replace(stage=GONE) if is_about else None
    return unblocked(_with(state, slot, left), 1 << slot)
