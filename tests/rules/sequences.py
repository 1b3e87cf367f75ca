"""What readers and the writer do: lease, open layers, read, publish, seal, and end."""

from collections.abc import Iterator

from tests.rules.rulebook import Kind, Rulebook, Step, put, unblocked
from tests.rules.state import (
    CLOSING,
    ENDING,
    FREE,
    HELD,
    IDLE,
    LAUNCHED,
    LAYER_BITS,
    LOST,
    NONE,
    ORPHAN,
    OWNING,
    RESERVED,
    SEALED,
    SPOILED,
    STRAY,
    WHOLE,
    WRITTEN,
    WRONG,
    Reader,
    Size,
    State,
    Writer,
)

START, FAULT, PROGRESS = Kind.START, Kind.FAULT, Kind.PROGRESS
ALL_DONE = (2, 2, 2)


def layers_of(rules: Rulebook, state: State, fill: int) -> tuple[int, ...]:
    """Return where the layers of leased pages stand, by what is filling them; DONE by nothing."""
    transfer = state.transfers[fill] if fill >= 0 else None
    return ALL_DONE if transfer is None else rules.layers(transfer.copies)


def has_failed(layers: tuple[int, ...], fill: int) -> bool:
    """Whether a sequence must start over: what fills its pages was lost, or has ended badly."""
    return fill == LOST or layers[-1] > 2


# -- readers -----------------------------------------------------------------------------------


def reader_steps(rules: Rulebook, size: Size, state: State, i: int) -> Iterator[Step]:
    """Everything one reader may do now."""
    reader = state.readers[i]
    if reader.phase == IDLE:
        for place in range(size.device_pages):
            page = state.pages[place]
            if page.state == SEALED:
                leased = Reader(HELD, place, 0, page.fill)
                yield ("reader leases", i, place), START, _with_reader(state, i, leased)
        return
    layers = layers_of(rules, state, reader.fill)
    if reader.run < reader.opened and (reader.fill < 0 or rules.runs[layers[reader.run]]):
        bits = LAYER_BITS[reader.run]
        is_wrong = state.pages[reader.page].bits & bits != bits
        is_bad = reader.is_bad or (is_wrong and reader.phase == HELD and reader.fill != LOST)
        after = reader._replace(run=reader.run + 1, is_bad=int(is_bad))
        yield ("reader's read runs", i, reader.run), PROGRESS, _with_reader(state, i, after)
    elif reader.phase != HELD and reader.run == reader.opened:
        yield ("reader is seen off", i), PROGRESS, _left(rules, state, i)
    if reader.phase == HELD:
        yield from _held_steps(rules, state, i, layers)


def _held_steps(rules: Rulebook, state: State, i: int, layers: tuple[int, ...]) -> Iterator[Step]:
    reader = state.readers[i]
    opened = reader.opened
    if opened < 2 and reader.fill != LOST and rules.opens[layers[opened]]:
        after = reader._replace(opened=opened + 1)
        yield ("reader opens layer", i, opened), PROGRESS, _with_reader(state, i, after)
    is_verified = reader.fill != LOST and all(rules.publishes[layer] for layer in layers[:2])
    if reader.run == 2 and is_verified:
        if reader.is_bad:
            wrong = _with_reader(state, i, reader._replace(phase=WRONG))
            yield ("reader publishes", i), PROGRESS, wrong
        else:
            yield ("reader publishes", i), PROGRESS, _left(rules, state, i)
    if has_failed(layers, reader.fill) and rules.guards.lost_is_told:
        yield ("reader starts over", i), PROGRESS, _closed(rules, state, i)
    else:
        yield ("reader is aborted", i), FAULT, _closed(rules, state, i)


def _with_reader(state: State, i: int, reader: Reader) -> State:
    readers = state.readers
    return State(state.pages, (*readers[:i], reader, *readers[i + 1 :]), *state[2:])


def _left(rules: Rulebook, state: State, i: int) -> State:
    return unblocked(_with_reader(state, i, Reader()), rules.reader_bits[i])


def _closed(rules: Rulebook, state: State, i: int) -> State:
    """Close a lease; its pages wait for the reads that were launched (R6)."""
    reader = state.readers[i]
    if reader.run == reader.opened:
        return _left(rules, state, i)
    if rules.guards.closes_after_last_use:
        return _with_reader(state, i, reader._replace(phase=CLOSING, is_bad=0))
    state = unblocked(state, rules.reader_bits[i])
    return _with_reader(state, i, reader._replace(phase=ORPHAN))


# -- the writer --------------------------------------------------------------------------------


def writer_steps(rules: Rulebook, size: Size, state: State) -> Iterator[Step]:
    """Everything the writer may do now."""
    writer = state.writer
    match writer.phase:
        case 0:
            yield from _starts(rules, size, state)
        case 1:  # RESERVED
            for place in range(size.device_pages):
                taken = rules.acquire(state, place)
                if taken is not None:
                    owning = writer._replace(phase=OWNING, own=place)
                    yield ("writer takes a page", place), PROGRESS, taken._replace(writer=owning)
        case 2:  # OWNING
            layers = layers_of(rules, state, writer.fill)
            if writer.fill != LOST and all(rules.opens[layer] for layer in layers[:2]):
                launched = state._replace(writer=writer._replace(phase=LAUNCHED))
                yield ("writer's step is launched",), PROGRESS, launched
        case 4:  # WRITTEN
            yield from _seals(rules, state)
        case _:
            yield from _runs(rules, state)
    if RESERVED <= writer.phase <= WRITTEN:
        layers = layers_of(rules, state, writer.fill)
        if has_failed(layers, writer.fill) and rules.guards.lost_is_told:
            yield ("writer starts over",), PROGRESS, _closed_writer(rules, state)
        else:
            yield ("writer is aborted",), FAULT, _closed_writer(rules, state)


def promised(state: State) -> int:
    """Return how many device pages are promised and not yet taken."""
    return int(state.writer.phase == RESERVED)


def can_promise(rules: Rulebook, size: Size, state: State) -> bool:
    """Whether one more device page may be promised or taken without a promise."""
    free = sum(page.state == FREE for page in state.pages[: size.device_pages])
    return rules.guards.may_promise(free, promised(state))


def _starts(rules: Rulebook, size: Size, state: State) -> Iterator[Step]:
    if not can_promise(rules, size, state):
        return
    yield ("writer starts alone",), START, state._replace(writer=Writer(RESERVED))
    for place in range(size.device_pages):
        page = state.pages[place]
        if page.state == SEALED:
            writer = Writer(RESERVED, place, 0, page.fill)
            yield ("writer starts behind", place), START, state._replace(writer=writer)


def _runs(rules: Rulebook, state: State) -> Iterator[Step]:
    """The launched step runs: it reads what is in front and writes the page of its own."""
    writer = state.writer
    layers = layers_of(rules, state, writer.fill)
    if writer.fill >= 0 and not all(rules.runs[layer] for layer in layers[:2]):
        return
    is_good = writer.page == NONE or state.pages[writer.page].bits == WHOLE
    own = state.pages[writer.own]
    ran = put(state, writer.own, own._replace(bits=WHOLE if is_good else 0))
    if writer.phase == LAUNCHED:
        written = ran._replace(writer=writer._replace(phase=WRITTEN))
        yield ("writer's step runs",), PROGRESS, written
    elif writer.phase == STRAY:
        yield ("writer's forgotten step runs",), PROGRESS, ran._replace(writer=Writer())
    elif writer.phase == ENDING:
        yield ("writer's last step runs",), PROGRESS, _gave_back(rules, ran)


def _seals(rules: Rulebook, state: State) -> Iterator[Step]:
    writer = state.writer
    layers = layers_of(rules, state, writer.fill)
    if writer.fill == LOST or not all(rules.seals[layer] for layer in layers[:2]):
        return
    sealed = rules.seal(state, writer.own)
    if sealed is None:
        return
    if state.pages[writer.own].bits != WHOLE:
        spoiled = sealed._replace(writer=writer._replace(phase=SPOILED))
        yield ("writer seals",), PROGRESS, spoiled
    else:
        sealed = unblocked(sealed._replace(writer=Writer()), rules.writer_bit)
        yield ("writer seals",), PROGRESS, sealed


def _closed_writer(rules: Rulebook, state: State) -> State:
    writer = state.writer
    if writer.phase != LAUNCHED:
        return _gave_back(rules, state)
    if rules.guards.closes_after_last_use:
        return state._replace(writer=writer._replace(phase=ENDING))
    released = rules.release(state, writer.own) or state
    stray = released.writer._replace(phase=STRAY, page=NONE, age=0)
    return unblocked(released._replace(writer=stray), rules.writer_bit)


def _gave_back(rules: Rulebook, state: State) -> State:
    """End the writer in no step: its own page is released, its promise forfeited."""
    own = state.writer.own
    released = state if own == NONE else rules.release(state, own) or state
    return unblocked(released._replace(writer=Writer()), rules.writer_bit)
