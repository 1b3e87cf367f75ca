"""The messages of kvlease's RPC protocol, as msgspec tagged unions; docs/rpc.md has their bytes.

A frame is four bytes of length, big-endian, and so many bytes of MessagePack: one message, an array
whose first item is the message's number. Later versions may add items at an array's end; both
sides ignore items that they do not know and take defaults for those that are not there. This
module knows neither sockets nor engines.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import Usage

VERSION = 1
"""The one version of the protocol that this package speaks."""
MAGIC = "kvlease-rpc"
"""What a greeting begins with, so that nobody takes another service for this one."""
HEADER_BYTES = 4
MAX_HANDSHAKE_BYTES = 1024
"""Frames of a handshake are no longer; nobody is given more memory before he is known."""
NONCE_BYTES = 32

Code: TypeAlias = Literal[
    "bad_request", "unauthorized", "forbidden", "version", "too_large", "too_many", "busy",
    "draining", "deadline", "slow_reader", "unavailable", "failed", "protocol",
    "idle", "internal", "cancelled",
]  # fmt: skip
"""Why something was refused or came to nothing; docs/rpc.md says what to do about each."""
NewCall: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A client's own number for a call that begins."""
CacheTier: TypeAlias = Literal["device", "host"]
Change: TypeAlias = Literal["sealed", "stored", "restored", "evicted"]


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Something sent over a connection."""


# -- the handshake -----------------------------------------------------------------------------


class Greeting(Message, tag=0, frozen=True, gc=False):
    """The server's first frame: what it speaks, and what the client has to sign."""

    magic: str
    first_version: int
    last_version: int
    nonce: bytes
    needs_secret: bool


class Hello(Message, tag=1, frozen=True, gc=False):
    """The client's answer. ``mac`` is empty where no secret is needed."""

    version: int
    tenant: str
    nonce: bytes
    mac: bytes


class Welcome(Message, tag=2, frozen=True, gc=False):
    """The server's consent: its own proof that it knows the secret, and the limits that hold."""

    mac: bytes
    server: str
    model: str
    vocab_size: int
    page_tokens: int
    max_frame_bytes: int
    max_streams: int
    idle_timeout_s: float
    incarnation: str
    """Of this run of the server; another one has an empty cache and numbers events anew."""


class Goodbye(Message, tag=3, frozen=True, gc=False):
    """The server's last frame before it closes the connection."""

    code: Code
    message: str
    retry_after_s: float | None = None


# -- from the client ---------------------------------------------------------------------------


class Generate(Message, tag=16, frozen=True, gc=False):
    """Answer a prompt of int32 little-endian token ids; ``call`` is the client's own number."""

    call: NewCall
    prompt: bytes
    params: SamplingParams = SamplingParams()
    credit: int = 0
    """Tokens that may be sent before the client gives more credit."""
    timeout_s: float | None = None


class Credit(Message, tag=17, frozen=True, gc=False):
    """So many more items of a call may be sent."""

    call: int
    amount: int


class Cancel(Message, tag=18, frozen=True, gc=False):
    """End a call; its last message follows."""

    call: int


class Ping(Message, tag=19, frozen=True, gc=False):
    """Answer with the same number; keeps a quiet connection open."""

    number: int


class Prefetch(Message, tag=20, frozen=True, gc=False):
    """Bring what is cached of a prompt to a tier."""

    call: NewCall
    prompt: bytes
    tier: CacheTier = "device"


class Pin(Message, tag=21, frozen=True, gc=False):
    """Keep what is cached of a prompt from being evicted, for so many seconds."""

    call: NewCall
    prompt: bytes
    seconds: float


class Unpin(Message, tag=22, frozen=True, gc=False):
    """End a pin before its time."""

    call: NewCall
    pin: int


class Evict(Message, tag=23, frozen=True, gc=False):
    """Let go of every idle cached page whose prefix begins with these tokens."""

    call: NewCall
    prefix: bytes
    tier: CacheTier | None = None
    """From one tier only; from both by default."""


class Flush(Message, tag=24, frozen=True, gc=False):
    """Forget everything that is cached, of all tenants."""

    call: NewCall


class GetStatistics(Message, tag=25, frozen=True, gc=False):
    """Tell counters and pools; ``recount`` counts every page anew."""

    call: NewCall
    recount: bool = False


class GetHealth(Message, tag=26, frozen=True, gc=False):
    """Tell whether the server takes requests."""

    call: NewCall


class Drain(Message, tag=27, frozen=True, gc=False):
    """Take no more requests, finish those that run, and end the server."""

    call: NewCall


class Subscribe(Message, tag=28, frozen=True, gc=False):
    """Send what happens to cached pages, from an event on (None: from now on)."""

    call: NewCall
    since: int | None = None
    credit: int = 0


# -- from the server ---------------------------------------------------------------------------


class Piece(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The next tokens of one call, int32 little-endian; the first is number ``start`` of it."""

    call: int
    start: int
    tokens: bytes
    logprobs: list[float | None] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


class Tokens(Message, tag=32, frozen=True, gc=False):
    """Tokens of as many calls as had some ready."""

    pieces: list[Piece]


class Ended(Message, tag=33, frozen=True, gc=False):
    """The last message of a `Generate` that got its answer, or that was cancelled."""

    call: int
    finish_reason: str
    usage: Usage
    ttft_s: float | None = None
    tpot_s: float | None = None


class Failed(Message, tag=34, frozen=True, gc=False):
    """The last message of any call that was refused or came to nothing."""

    call: int
    code: Code
    message: str
    retry_after_s: float | None = None


class Pong(Message, tag=35, frozen=True, gc=False):
    """The answer to a `Ping`."""

    number: int


class Prefetched(Message, tag=40, frozen=True, gc=False):
    """How many of the prompt's tokens are on the tier now, and how many of them were moved."""

    call: int
    tokens: int
    moved_tokens: int


class Pinned(Message, tag=41, frozen=True, gc=False):
    """A pin's number, and how many of the prompt's tokens it holds."""

    call: int
    pin: int
    tokens: int


class Unpinned(Message, tag=42, frozen=True, gc=False):
    """Whether there was such a pin."""

    call: int
    was_pinned: bool


class Evicted(Message, tag=43, frozen=True, gc=False):
    """Pages let go by tier, and pages that stay because somebody uses them."""

    call: int
    device_pages: int
    host_pages: int
    kept_pages: int


class Flushed(Message, tag=44, frozen=True, gc=False):
    """Everything that was cached is forgotten."""

    call: int


class PoolCounts(msgspec.Struct, frozen=True, gc=False):
    """One pool's ledger; the columns add up to ``total``."""

    total: int
    free: int
    reserved: int
    held: int
    sealed: int
    quarantined: int


class TenantCounts(msgspec.Struct, frozen=True, gc=False):
    """What one tenant has now, and has had."""

    streams: int = 0
    calls: int = 0
    refused: int = 0
    device_pages: int = 0
    host_pages: int = 0


class ServerStatistics(msgspec.Struct, frozen=True, gc=False):
    """Counters so far, gauges now.

    ``engine`` and ``doors`` are counters by name; ``refused`` counts by code, ``tool_call_errors``
    malformed calls by reason; ``ledger_error`` is the sentence about pages that do not add up.
    """

    uptime_s: float
    waiting: int
    running: int
    streams: int
    connections: int
    engine: dict[str, float]
    doors: dict[str, int]
    refused: dict[str, int]
    pools: dict[str, PoolCounts]
    tenants: dict[str, TenantCounts]
    ledger_ok: bool
    ledger_error: str | None = None
    tool_call_errors: dict[str, int] = msgspec.field(default_factory=dict[str, int])


class StatisticsAre(Message, tag=45, frozen=True, gc=False):
    """The answer to `GetStatistics`."""

    call: int
    statistics: ServerStatistics


class Health(msgspec.Struct, frozen=True, gc=False):
    """Whether requests are taken: ``serving`` or ``draining``."""

    status: Literal["serving", "draining"]
    version: str
    model: str
    uptime_s: float
    streams: int


class HealthIs(Message, tag=46, frozen=True, gc=False):
    """The answer to `GetHealth`."""

    call: int
    health: Health


class Drained(Message, tag=47, frozen=True, gc=False):
    """No request is left; ``cut`` of them had not finished within the limit."""

    call: int
    cut: int


class CacheEvent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Pages came to a tier or left it.

    ``keys`` holds 16 bytes for each page: the chained key of its whole prefix. Numbers have no
    gaps, but a client hears of its own tenant's only.
    """

    number: int
    change: Change
    tier: CacheTier
    keys: bytes


class CacheEvents(Message, tag=48, frozen=True, gc=False):
    """What happened up to event ``last``; events up to ``lost`` are not to be had any more."""

    call: int
    last: int
    events: list[CacheEvent]
    lost: int = 0


ClientMessage: TypeAlias = (
    Generate | Credit | Cancel | Ping | Prefetch | Pin | Unpin | Evict | Flush
    | GetStatistics | GetHealth | Drain | Subscribe
)  # fmt: skip
"""What a server reads after the handshake."""
Answer: TypeAlias = (
    Prefetched | Pinned | Unpinned | Evicted | Flushed | StatisticsAre | HealthIs | Drained
)
"""The one answer to a call that has one."""
ServerMessage: TypeAlias = Tokens | Ended | Failed | Pong | Answer | CacheEvents | Goodbye
"""What a client reads after the handshake."""
