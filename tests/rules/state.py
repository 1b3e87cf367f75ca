"""A world as plain data: pages, readers, a writer, transfers and a remote writer.

Everything is a tuple of small numbers, so that worlds hash and compare quickly. A reference holds
a page's place and its age: 0 while the page is of the generation that was meant, 1 once it is not.
Epochs are thereby named relative to what refers to them, and a dead one's number is forgotten.
"""

from typing import NamedTuple

from kvlease.protocols.machines import PageState
from kvlease.protocols.ports import CompletionState

FREE, EXCLUSIVE, SEALED, QUARANTINED = range(4)
PAGE_STATES = tuple(PageState)
PLANNED, RECORDED, DONE, FAILED, REVOKED = range(5)
COPY_STATES = tuple(CompletionState)

LAYER_COPIES = ((0, 1), (2,))
"""Two layers: the first has two components (latent KV and index keys), the second has one."""
LAYER_BITS = (3, 4)
WHOLE = 7
"""A page's bits: one a component of a layer, set while its bytes are the right ones."""
NUM_COPIES = 3

NONE = -1
LOST = -2
"""In place of a transfer's slot: nothing is filling the pages; what did was lost."""


class Page(NamedTuple):
    """One page of one tier. ``twin`` is the copy of the same tokens on the other tier."""

    state: int = FREE
    bits: int = 0
    twin: int = NONE
    fill: int = NONE
    """Slot of the transfer that is filling it."""
    blockers: int = 0
    """Who must end before it leaves quarantine: a bit a transfer slot, then the sequences."""


IDLE, HELD, CLOSING, WRONG, ORPHAN = range(5)


class Reader(NamedTuple):
    """A shared lease: how many layers it has opened, and how many of these reads have run.

    CLOSING is a lease that was closed with reads under way, ORPHAN the same but forgotten (a
    planted bug), WRONG one that has published what it should not have read.
    """

    phase: int = IDLE
    page: int = NONE
    age: int = 0
    fill: int = NONE
    opened: int = 0
    run: int = 0
    is_bad: int = 0


RESERVED, OWNING, LAUNCHED, WRITTEN, ENDING, SPOILED, STRAY = range(1, 8)


class Writer(NamedTuple):
    """A sequence that computes one page of its own, reading a shared one in front of it if any.

    ENDING is one that was aborted with its step under way, STRAY the same but forgotten (a planted
    bug), SPOILED one that has sealed a page of wrong bytes.
    """

    phase: int = IDLE
    page: int = NONE
    age: int = 0
    fill: int = NONE
    own: int = NONE
    own_age: int = 0


LOAD, STORE = range(2)
PLANNED_OUT, REPORTED, GONE = range(3)


class Transfer(NamedTuple):
    """A load or a store; ``running`` is the copy that a stream is executing now.

    ``is_stuck``: its loader has died or its stream stands still. Stage REPORTED: the pools know
    how it ended; GONE: they believe that it has settled (only a planted bug leaves it about).
    """

    kind: int
    source: int
    source_age: int
    target: int
    target_age: int
    copies: tuple[int, ...]
    running: int = NONE
    is_stuck: int = 0
    stage: int = PLANNED_OUT


NO_GRANT, OPEN, EXPIRED = range(3)


class Remote(NamedTuple):
    """A write grant and its peer. ``air`` is the write that was let in and has not landed.

    ``is_alien``: that write was sent under a grant that has ended.
    """

    grant: int = NO_GRANT
    page: int = NONE
    age: int = 0
    copies: tuple[int, ...] = ()
    air: int = NONE
    is_alien: int = 0
    is_alive: int = 1


class Message(NamedTuple):
    """A write request that the network holds back; ``is_dead`` once its grant has ended."""

    page: int = NONE
    age: int = 0
    is_older_life: int = 0
    is_dead: int = 0


class State(NamedTuple):
    """One state of a world."""

    pages: tuple[Page, ...]
    readers: tuple[Reader, ...]
    writer: Writer
    transfers: tuple[Transfer | None, ...]
    remote: Remote
    message: Message


class Size(NamedTuple):
    """What one world has: device pages come first, host pages after them."""

    name: str
    device_pages: int = 2
    host_pages: int = 1
    cached: int = 0
    """Host pages that hold a prefix at the start."""
    num_readers: int = 0
    has_writer: bool = False
    transfers: int = 0
    loads: bool = False
    stores: bool = False
    has_remote: bool = False
    has_deaths: bool = True
    """Whether a transfer's loader may die, or its stream stand still, and the peer die."""

    @property
    def num_pages(self) -> int:
        """Pages of both tiers."""
        return self.device_pages + self.host_pages


def start_of(size: Size) -> State:
    """Return the world's first state."""
    host = [Page(SEALED, WHOLE) if i < size.cached else Page() for i in range(size.host_pages)]
    return State(
        (Page(),) * size.device_pages + tuple(host),
        (Reader(),) * size.num_readers,
        Writer(),
        (None,) * size.transfers,
        Remote(),
        Message(),
    )


def shown(state: State) -> str:
    """Return a state in a line, for a person; what is idle is left out."""
    pages = ", ".join(_shown_page(page) for page in state.pages)
    parts = [f"pages {pages}"]
    parts += [f"reader {tuple(one)}" for one in state.readers if one.phase]
    parts += [f"writer {tuple(state.writer)}"] if state.writer.phase else []
    parts += [f"transfer {tuple(one)}" for one in state.transfers if one is not None]
    parts += [f"remote {tuple(state.remote)}"] if state.remote.grant else []
    return " | ".join(parts)


def _shown_page(page: Page) -> str:
    name = PAGE_STATES[page.state].value
    if page.fill != NONE:
        name += f" loading by {page.fill}"
    if page.blockers:
        name += f" blocked {page.blockers:b}"
    return f"{name} {page.bits:03b}"
