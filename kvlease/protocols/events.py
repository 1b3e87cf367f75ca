"""The event log's vocabulary: one struct per transition, from which R1 to R12 can be decided.

An event is written by the call that makes its transition (R14). Sinks fill in ``seq`` and ``t_ns``;
everything else is the caller's. Pages are runs ``(first, count, epoch)`` of one tier; layers are a
run ``(first, count)``. This module does not know where events go.

Two orders matter. ``seq`` is the order in which transitions happened. A step's openings carry the
``seq`` the log had reached when the layer was opened, so that one ``step.read`` at the end of a
forward still tells, layer by layer, what had been recorded before the rows were read.

How many: a decode step writes one ``step.done``, and one ``step.read`` only when the set of leases
or their readiness changed since the read it names; a page writes three or four events in its life;
a load a dozen. That stays under two events per output token on average.
"""

from typing import Literal, TypeAlias

import msgspec

from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.protocols.event_base import (
    SCHEMA_VERSION,
    Event,
    EventSink,
    LayerRun,
    NormalEvent,
    Opening,
    PageRun,
    Tier,
    current_actor,
    runs_of,
)
from kvlease.protocols.event_pages import (
    LeaseClose,
    LeaseMove,
    LeaseOpen,
    LeaseWait,
    PageEvict,
    PageFlush,
    PageFree,
    PageLedger,
    PageMismatch,
    PagePin,
    PageQuarantine,
    PageReserve,
    PageSeal,
    PageUnpin,
)
from kvlease.protocols.event_rpc import RpcCall, RpcClose, RpcDrain, RpcOpen, RpcRefused
from kvlease.protocols.event_work import (
    Row,
    Stall,
    StepDiscarded,
    StepDone,
    StepRan,
    StepRead,
    TransferDone,
    TransferFail,
    TransferLanded,
    TransferLate,
    TransferLayerDone,
    TransferPlan,
    TransferRecord,
    TransferRevoke,
)
from kvlease.protocols.schema import Schema

__all__ = [
    "SCHEMA_VERSION",
    "ActorDied",
    "ActorRestart",
    "ActorStart",
    "ActorStop",
    "AnyEvent",
    "ComponentFacts",
    "Event",
    "EventSink",
    "LayerRun",
    "LeaseClose",
    "LeaseMove",
    "LeaseOpen",
    "LeaseWait",
    "LogClose",
    "LogGap",
    "LogOpen",
    "NormalEvent",
    "Opening",
    "PageEvict",
    "PageFlush",
    "PageFree",
    "PageLedger",
    "PageMismatch",
    "PagePin",
    "PageQuarantine",
    "PageReserve",
    "PageRun",
    "PageSeal",
    "PageUnpin",
    "RequestAdmitted",
    "RequestCancelled",
    "RequestFailed",
    "RequestFinished",
    "RequestPreempted",
    "RequestSubmitted",
    "RequestToolCallError",
    "Row",
    "RpcCall",
    "RpcClose",
    "RpcDrain",
    "RpcOpen",
    "RpcRefused",
    "Stall",
    "StepDiscarded",
    "StepDone",
    "StepRan",
    "StepRead",
    "Tier",
    "TransferDone",
    "TransferFail",
    "TransferLanded",
    "TransferLate",
    "TransferLayerDone",
    "TransferPlan",
    "TransferRecord",
    "TransferRevoke",
    "Usage",
    "component_facts",
    "current_actor",
    "runs_of",
]


class ComponentFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One component as a checker needs it; bytes are per page of a span, per kept tail else."""

    name: str
    kind: Literal["span", "tail"]
    layers: list[int]
    nbytes: int


def component_facts(schema: Schema) -> list[ComponentFacts]:
    """List a schema's components as the head of a log states them, one entry a component and size.

    A component whose bytes differ between layers (a heavily-compressed layer's latent rows are
    fewer than a sparse one's) gets one entry for each size.
    """
    sizes: dict[tuple[str, Literal["span", "tail"], int], list[int]] = {}
    for layer in schema.layers:
        for span in layer.spans:
            nbytes = schema.rows_per_page(span) * span.format.nbytes
            sizes.setdefault((span.name, "span", nbytes), []).append(layer.id)
        for tail in layer.tails:
            sizes.setdefault((tail.name, "tail", tail.kept_nbytes), []).append(layer.id)
    return [
        ComponentFacts(name=name, kind=kind, layers=layers, nbytes=nbytes)
        for (name, kind, nbytes), layers in sizes.items()
    ]


class LogOpen(NormalEvent, tag="log.open", kw_only=True, gc=False):
    """First line of every log: what the other lines have to be judged by.

    Attributes:
        identity: everything that changes cached bytes, as one hash (R10).
        components: all components of the schema, spans and tails.
        device_pages, host_pages: totals of the two pools (R11).
        started_at: wall clock time, ISO 8601, for people.
        config: everything the engine was opened with, but for the tenant's salt.
        ports: what stood behind the engine's ports, where that was not the machine itself.
    """

    schema: int
    program: str
    level: Literal["normal", "audit"]
    model: str
    identity: str
    num_layers: int
    page_tokens: int
    components: list[ComponentFacts]
    device_pages: int
    host_pages: int
    started_at: str = ""
    config: EngineConfig | None = None
    ports: dict[str, object] | None = None


class LogGap(NormalEvent, tag="log.gap", kw_only=True, gc=False):
    """Events that were made but could not be kept; a checker has to say *cannot tell*."""

    first_seq: int
    last_seq: int
    reason: str


class LogClose(NormalEvent, tag="log.close", kw_only=True, gc=False):
    """Last line of a log that was closed in order."""

    events: int
    lost: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a request's tokens came from; the buckets of a prompt sum to it (R12).

    ``recomputed`` counts work done again (preemption, failed loads) and stands apart.
    """

    prompt: int
    hit_device: int = 0
    hit_host: int = 0
    hit_storage: int = 0
    hit_remote: int = 0
    computed: int = 0
    recomputed: int = 0
    output: int = 0


class RequestSubmitted(NormalEvent, tag="request.submitted", kw_only=True, gc=False):
    """A request passed the door. ``deadline_ns`` is on the log's clock, 0 for none (R9)."""

    request: int
    prompt_tokens: int
    max_tokens: int
    deadline_ns: int = 0
    parent: int = 0
    """The request it was forked from, if any."""
    prompt: bytes = b""
    """The prompt's int32 ids, and with them ``params``; only if the engine records prompts."""
    params: SamplingParams | None = None


class RequestAdmitted(NormalEvent, tag="request.admitted", kw_only=True, gc=False):
    """A request got pages: what the prefix index gave it, and what is left to compute.

    Attributes:
        matched_tokens: length of the longest cached path, before any cut.
        used_tokens: where computing resumes: matched, cut back to a boundary with a tail (R5).
        hit_pages: used pages by the tier that holds them: device, host, storage, remote.
        reasons: computed tokens by reason, e.g. ``new``, ``partial_page``, ``no_tail``.
        decision: ``load`` or ``recompute``, with both estimates in microseconds.
        identity: the cache identity it was matched under, if not that of ``log.open`` (R10).
        tenant: whose it is, as a hash of the salt that was asked for; empty if none was.
    """

    request: int
    matched_tokens: int
    used_tokens: int
    hit_pages: tuple[int, int, int, int]
    reasons: dict[str, int]
    decision: str = ""
    load_us: int = 0
    recompute_us: int = 0
    identity: str = ""
    tenant: str = ""
    again: bool = False
    """Whether it had been admitted before and was preempted."""


class RequestPreempted(NormalEvent, tag="request.preempted", kw_only=True, gc=False):
    """A running request gave its pages back and waits to be admitted again."""

    request: int
    reason: str
    kept_tokens: int
    dropped_tokens: int


class RequestCancelled(NormalEvent, tag="request.cancelled", kw_only=True, gc=False):
    """Its caller called a request off; the terminal event follows when no step uses it."""

    request: int


class RequestFinished(NormalEvent, tag="request.finished", kw_only=True, gc=False):
    """The terminal event of a request that got an answer, whole or cut short by its caller."""

    request: int
    reason: str
    usage: Usage
    ttft_us: int = 0
    answer: str = ""
    """Hash of the tokens, and of the logits' digests where the engine keeps them."""


class RequestFailed(NormalEvent, tag="request.failed", kw_only=True, gc=False):
    """The terminal event of a request that got no answer."""

    request: int
    reason: str
    usage: Usage


class RequestToolCallError(NormalEvent, tag="request.tool_call_error", kw_only=True, gc=False):
    """An answer's tool call is malformed, the first symptom of a cache that is corrupt.

    Attributes:
        reason: ``syntax``, ``unknown_tool``, ``duplicate_parameter``, ``invalid_json``, ``schema``
            or ``truncated``.
        raw: what the model wrote, from the start of its calls; the end of it where it is long.
    """

    request: int
    reason: str
    message: str
    raw: str


class ActorStart(NormalEvent, tag="actor.start", kw_only=True, gc=False):
    """An actor began to take messages."""


class ActorStop(NormalEvent, tag="actor.stop", kw_only=True, gc=False):
    """An actor was closed on purpose."""


class ActorDied(NormalEvent, tag="actor.died", kw_only=True, gc=False):
    """An actor failed; what it had under way ends in the events that follow.

    ``rule`` is the rule that a guard kept by raising ``error``, if it was a guard.
    """

    error: str
    rule: str = ""


class ActorRestart(NormalEvent, tag="actor.restart", kw_only=True, gc=False):
    """A supervisor started a new actor in a dead one's place."""

    restarts: int


AnyEvent: TypeAlias = (
    LogOpen | LogGap | LogClose
    | RequestSubmitted | RequestAdmitted | RequestPreempted
    | RequestCancelled | RequestFinished | RequestFailed | RequestToolCallError
    | PageReserve | PageSeal | PageEvict | PageQuarantine | PageFree | PageLedger | PageMismatch
    | PageFlush | PagePin | PageUnpin
    | LeaseOpen | LeaseWait | LeaseClose | LeaseMove
    | TransferPlan | TransferRecord | TransferLanded | TransferLayerDone | TransferDone
    | TransferFail | TransferRevoke | TransferLate
    | StepRead | StepRan | StepDone | StepDiscarded
    | ActorStart | ActorStop | ActorDied | ActorRestart
    | RpcOpen | RpcRefused | RpcCall | RpcClose | RpcDrain
)  # fmt: skip
"""The union a reader decodes a line into."""
