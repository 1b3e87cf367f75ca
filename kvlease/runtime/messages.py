"""Messages to the scheduler and from it to the step workers.

Requests are imperative, facts are past participles. All travel through typed mailboxes inside one
process; a message that carries leases moves them to the receiver.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

from attrs import define, frozen

from kvlease.pools.controls import Quota
from kvlease.protocols.ownership import StepLease
from kvlease.protocols.ports import SampledToken, StepInput
from kvlease.protocols.rpc import CacheTier
from kvlease.runtime.replies import Reply
from kvlease.runtime.request import Request
from kvlease.runtime.sequence import Sequence
from kvlease.runtime.transfer import Transfer

StepKind: TypeAlias = Literal["prefill", "decode"]


@frozen
class PrefetchResult:
    """Tokens of the prompt that are on the tier now, and how many of them were moved for it."""

    tokens: int
    moved_tokens: int


@frozen
class PinResult:
    """A pin's number, and how many of the prompt's tokens it holds."""

    pin: int
    tokens: int


@frozen
class EvictResult:
    """Pages let go by tier, and copies that stay because somebody uses them."""

    device_pages: int
    host_pages: int
    kept_pages: int


@frozen
class Submit:
    """Queue a request."""

    request: Request


@frozen
class Cancel:
    """End a request; its caller has gone or wants no more."""

    request: Request


@frozen
class Flush:
    """Forget everything cached: the weights changed. ``done`` is answered when it has happened."""

    done: Reply[None]


@frozen
class Prefetch:
    """Bring what is cached of a prompt to a tier; answered when it is there."""

    salt: bytes
    prompt: bytes
    tier: CacheTier
    done: Reply[PrefetchResult]


@frozen
class PinPrefix:
    """Keep what is cached of a prompt for so many seconds."""

    salt: bytes
    prompt: bytes
    seconds: float
    done: Reply[PinResult]


@frozen
class Unpin:
    """End a tenant's pin; answered with whether there was such a pin."""

    salt: bytes
    pin: int
    done: Reply[bool]


@frozen
class EvictPrefix:
    """Let idle pages go whose prefix begins with these tokens."""

    salt: bytes
    prefix: bytes
    tier: CacheTier | None
    done: Reply[EvictResult]


@frozen
class SetQuota:
    """Bound what a tenant may keep cached, from now on."""

    salt: bytes
    quota: Quota
    done: Reply[None]


CacheMessage: TypeAlias = Prefetch | PinPrefix | Unpin | EvictPrefix | SetQuota
"""What users ask of the cache itself."""


@frozen
class PagesGivenBack:
    """Pages came free outside of the scheduler: somebody may be waiting for them."""


@frozen
class KeepTail:
    """Copy a member's state at a boundary into a tail slot right after the step."""

    member: int
    boundary: int
    tail_slot: int


@define(eq=False)
class StepOrder:
    """One batch to run: takes the step lease; the members' own leases stay with the scheduler."""

    phase: StepKind
    members: tuple[Sequence, ...]
    inputs: StepInput
    lease: StepLease
    keeps: tuple[KeepTail, ...]
    started_s: float
    on_launch: Callable[[], None]
    """What has waited for its launch: callers' time, for example, holds nobody up then."""
    is_launched: bool = False
    """Whether all its work is in the stream's order."""
    is_settled: bool = False
    """Whether its device work has ended; until then it blocks the reuse of pages it may read."""
    is_spoiled: bool = False
    """Whether a page that it reads was found changed meanwhile: it must publish nothing."""

    def launched(self) -> None:
        """Hear that all its work is in the stream's order."""
        self.is_launched = True
        self.on_launch()

    @property
    def kind(self) -> str:
        """What it is as a blocker of pages."""
        return "step"

    @property
    def id(self) -> int:
        """The step's number."""
        return self.inputs.step


@frozen
class StepEnded:
    """A step is over and its device work has ended, whatever became of it.

    ``tokens`` per member, or None when the step has to be discarded because of ``error``.
    """

    order: StepOrder
    tokens: tuple[tuple[SampledToken, ...], ...] | None
    error: Exception | None


@frozen
class TransferEnded:
    """A transfer reached its final state; readers may be told."""

    transfer: Transfer


@frozen
class TransferSettled:
    """No copy of a transfer will touch memory any more."""

    transfer: Transfer


SchedulerMessage: TypeAlias = (
    Submit
    | Cancel
    | Flush
    | PagesGivenBack
    | StepEnded
    | TransferEnded
    | TransferSettled
    | CacheMessage
)
