"""A set of guards, tabulated, and the changes to pages that several actions share."""

from enum import Enum
from typing import final

from kvlease.errors import IllegalTransition
from kvlease.protocols.machines import Copy, CopyEvent, PageEvent
from tests.rules.guards import Guards
from tests.rules.state import (
    CLOSING,
    COPY_STATES,
    FREE,
    HELD,
    LAYER_COPIES,
    NONE,
    PAGE_STATES,
    PLANNED_OUT,
    REPORTED,
    Page,
    State,
    Transfer,
)

NBYTES = 8


class Kind(Enum):
    """What an action means for R9: new work, a fault, or what must happen by itself."""

    START = "start"
    FAULT = "fault"
    PROGRESS = "progress"


Label = tuple[str | int, ...]
Step = tuple[Label, Kind, State]
Row = tuple[int | None, ...]
"""What one event makes of each state; None where the machine refuses it."""


@final
class Rulebook:
    """The guards of one world as tables over small numbers."""

    def __init__(self, guards: Guards, num_transfers: int) -> None:
        self.guards = guards
        self.writer_bit = 1 << num_transfers
        self.reader_bits = tuple(1 << (num_transfers + 1 + i) for i in range(4))
        self.acquires = self._page_row(PageEvent.ACQUIRE)
        self._seals = self._page_row(PageEvent.SEAL)
        self._releases = self._page_row(PageEvent.RELEASE)
        self._reclaims = self._page_row(PageEvent.RECLAIM)
        self.records = self._copy_row(CopyEvent.RECORD)
        self.finishes = self._copy_row(CopyEvent.FINISH)
        self.shortens = self._copy_row(CopyEvent.FINISH, NBYTES - 1)
        self.fails = self._copy_row(CopyEvent.FAIL)
        self.revokes = self._copy_row(CopyEvent.REVOKE)
        self._layers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.opens = [guards.may_open(state) for state in COPY_STATES]
        self.runs = [guards.may_run(state) for state in COPY_STATES]
        self.publishes = [guards.may_publish(state) for state in COPY_STATES]
        self.seals = [guards.may_seal(state) for state in COPY_STATES]
        self.begins = [guards.may_begin(state) for state in COPY_STATES]
        self.settles = {
            (code, is_running): guards.is_settled(state, is_running)
            for code, state in enumerate(COPY_STATES)
            for is_running in (True, False)
        }

    def _page_row(self, event: PageEvent) -> Row:
        row: list[int | None] = []
        for before in PAGE_STATES:
            try:
                row.append(PAGE_STATES.index(self.guards.step_page(before, event)))
            except IllegalTransition:
                row.append(None)
        return tuple(row)

    def _copy_row(self, event: CopyEvent, nbytes: int = NBYTES) -> Row:
        row: list[int | None] = []
        for before in COPY_STATES:
            try:
                after = self.guards.step_copy(Copy(NBYTES, 0, before), event, nbytes)
                row.append(COPY_STATES.index(after.state))
            except IllegalTransition:
                row.append(None)
        return tuple(row)

    def _joint(self, codes: tuple[int, ...]) -> int:
        parts = [Copy(NBYTES, 0, COPY_STATES[code]) for code in codes]
        return COPY_STATES.index(self.guards.joint_state(parts))

    def layers(self, copies: tuple[int, ...]) -> tuple[int, ...]:
        """Return where each layer stands, and last where the whole does."""
        known = self._layers.get(copies)
        if known is None:
            each = tuple(self._joint(tuple(copies[i] for i in mine)) for mine in LAYER_COPIES)
            known = self._layers[copies] = (*each, self._joint(each))
        return known

    def whole(self, transfer: Transfer) -> int:
        """Return how the whole transfer stands."""
        return self.layers(transfer.copies)[-1]

    # -- changes to pages ----------------------------------------------------------------------

    def acquire(self, state: State, place: int) -> State | None:
        """Hand a page out; its bytes are not the new holder's."""
        after = self.acquires[state.pages[place].state]
        return None if after is None else put(state, place, Page(after))

    def seal(self, state: State, place: int, fill: int = NONE) -> State | None:
        """Show a held page in the index, loading if a transfer fills it."""
        page = state.pages[place]
        after = self._seals[page.state]
        if after is None:
            return None
        return put(state, place, page._replace(state=after, fill=fill))

    def release(self, state: State, place: int, blockers: int = 0) -> State | None:
        """Take a page back into quarantine, and free it at once if nobody may touch it."""
        page = state.pages[place]
        after = self._releases[page.state]
        if after is None:
            return None
        if page.twin != NONE:
            state = put(state, page.twin, state.pages[page.twin]._replace(twin=NONE))
        left = Page(after, 0, NONE, NONE, blockers)
        if after == FREE:
            left = Page()
        state = put(state, place, left)
        if self.guards.bumps_epoch:
            state = _aged(state, place)
        return self.reclaim(state, place) or state

    def reclaim(self, state: State, place: int) -> State | None:
        """Free a quarantined page whose blockers have all ended; None if it has to wait."""
        page = state.pages[place]
        after = self._reclaims[page.state]
        if after is None or not self.guards.may_reclaim(page.blockers):
            return None
        return put(state, place, Page(after))

    # -- who holds what ------------------------------------------------------------------------

    def is_pinned(self, state: State, place: int) -> bool:
        """Whether anyone's cursor is at the page's edge, through its copy on either tier."""
        twin = state.pages[place].twin
        places = (place,) if twin == NONE else (place, twin)
        for one in state.readers:
            if one.page in places and not one.age and one.phase in (HELD, CLOSING):
                return True
        if state.writer.page in places and not state.writer.age:
            return True
        last_held = REPORTED if self.guards.source_held_until_settled else PLANNED_OUT
        return any(
            (one.source in places and not one.source_age)
            or (one.target in places and not one.target_age)
            for one in state.transfers
            if one is not None and one.stage <= last_held
        )


def put(state: State, place: int, page: Page) -> State:
    """Return the state with one page replaced."""
    pages = state.pages
    return State((*pages[:place], page, *pages[place + 1 :]), *state[1:])


def stepped(copies: tuple[int, ...], index: int, row: Row) -> tuple[int, ...] | None:
    """Step one copy of a transfer; None where the machine refuses."""
    after = row[copies[index]]
    return None if after is None else (*copies[:index], after, *copies[index + 1 :])


def all_stepped(copies: tuple[int, ...], row: Row) -> tuple[int, ...]:
    """Step every copy that is not final; the others stay."""
    after = (row[code] for code in copies)
    return tuple(code if end is None else end for code, end in zip(copies, after, strict=True))


def unblocked(state: State, bit: int) -> State:
    """Return the state with one blocker ended, wherever it was waited for."""
    if not any(page.blockers & bit for page in state.pages):
        return state
    pages = tuple(page._replace(blockers=page.blockers & ~bit) for page in state.pages)
    return State(pages, *state[1:])


def _aged(state: State, place: int) -> State:
    """Make every reference to a page stale."""
    readers = tuple(
        one._replace(age=1) if one.page == place and one.phase else one for one in state.readers
    )
    writer = state.writer
    if writer.page == place:
        writer = writer._replace(age=1)
    if writer.own == place:
        writer = writer._replace(own_age=1)
    transfers = tuple(None if one is None else _aged_ends(one, place) for one in state.transfers)
    remote, message = state.remote, state.message
    if remote.page == place:
        remote = remote._replace(age=1)
    if message.page == place:
        message = message._replace(age=1)
    return State(state.pages, readers, writer, transfers, remote, message)


def _aged_ends(transfer: Transfer, place: int) -> Transfer:
    if transfer.source == place:
        transfer = transfer._replace(source_age=1)
    if transfer.target == place:
        transfer = transfer._replace(target_age=1)
    return transfer
