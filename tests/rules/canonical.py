"""One state for all that differ in names only: readers and pages that are alike are merged.

Readers and pages are put in an order that depends on what they are and on what refers to them. Two
that tie are alike in all of that, so either order will do; where a tie hides a difference the two
states stay apart, which costs a state and hides nothing.
"""

from itertools import pairwise

from tests.rules.state import (
    NONE,
    Message,
    Page,
    Reader,
    Remote,
    Size,
    State,
    Transfer,
    Writer,
)


def canonical(size: Size, first_reader_bit: int, state: State) -> State:
    """Return the state that stands for all with the same shape."""
    if len(state.readers) == 2:
        state = _ordered_readers(state, first_reader_bit)
    device, host = range(size.device_pages), range(size.device_pages, size.num_pages)
    if _is_ordered(state, device) and _is_ordered(state, host):
        return state
    marks = _marks(state)
    order = [
        place
        for places in (device, host)
        for place in sorted(places, key=lambda p: (_page_key(state.pages[p]), marks[p]))
    ]
    names = [0] * (size.num_pages + 1)
    names[NONE] = NONE
    for new, old in enumerate(order):
        names[old] = new
    return _renamed(state, order, names)


def _page_key(page: Page) -> tuple[int, ...]:
    state, bits, twin, fill, blockers = page
    return (state, bits, fill, blockers, int(twin != NONE))


def _is_ordered(state: State, places: range) -> bool:
    """Whether pages of one tier stand in their order already, as they mostly do."""
    if len(places) < 2:
        return True
    marks: list[int] | None = None
    keys = [_page_key(state.pages[place]) for place in places]
    for at, (one, other) in enumerate(pairwise(keys), places.start):
        if one > other:
            return False
        if one == other:
            marks = marks or _marks(state)
            if marks[at] > marks[at + 1]:
                return False
    return True


def _ordered_readers(state: State, bit: int) -> State:
    first, second = state.readers
    if first == second or _reader_key(state, first) <= _reader_key(state, second):
        return state
    both = bit | bit << 1
    pages = state.pages
    if any(page.blockers & both not in (0, both) for page in pages):
        pages = tuple(
            page._replace(blockers=page.blockers ^ both)
            if page.blockers & both not in (0, both)
            else page
            for page in pages
        )
    return state._replace(pages=pages, readers=(second, first))


def _reader_key(state: State, reader: Reader) -> tuple[int, ...]:
    own = (reader.phase, *reader[2:])
    if reader.page == NONE:
        return own
    page: Page = state.pages[reader.page]
    return (*own, page.state, page.bits, page.fill, int(page.twin != NONE))


def _marks(state: State) -> list[int]:
    """Who refers to each page: a bit a role."""
    marks = [0] * (len(state.pages) + 1)
    bit = 1
    for reader in state.readers:
        marks[reader.page] |= bit
        bit <<= 1
    for place in (state.writer.page, state.writer.own, state.remote.page, state.message.page):
        marks[place] |= bit
        bit <<= 1
    for transfer in state.transfers:
        if transfer is not None:
            marks[transfer.source] |= bit
            marks[transfer.target] |= bit << 1
        bit <<= 2
    return marks


def _renamed(state: State, order: list[int], names: list[int]) -> State:
    pages = tuple(
        page if page.twin == NONE else page._replace(twin=names[page.twin])
        for page in (state.pages[old] for old in order)
    )
    readers = tuple(
        one if one.page == NONE else Reader(one.phase, names[one.page], *one[2:])
        for one in state.readers
    )
    writer, remote, message = state.writer, state.remote, state.message
    if writer.phase:
        writer = Writer(
            writer.phase,
            names[writer.page],
            writer.age,
            writer.fill,
            names[writer.own],
            writer.own_age,
        )
    if remote.page != NONE:
        remote = Remote(remote.grant, names[remote.page], *remote[2:])
    if message.page != NONE:
        message = Message(names[message.page], *message[1:])
    transfers = tuple(
        None
        if one is None
        else Transfer(
            one.kind,
            names[one.source],
            one.source_age,
            names[one.target],
            *one[4:],
        )
        for one in state.transfers
    )
    return State(pages, readers, writer, transfers, remote, message)
