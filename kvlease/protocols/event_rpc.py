"""Log events of the doors: the access log, ``rpc.*``, whichever door a client came through."""

from typing import Literal

from kvlease.protocols.event_base import NormalEvent


class RpcOpen(NormalEvent, tag="rpc.open", kw_only=True, gc=False):
    """A client was let in; ``client`` is its number in this log from now on."""

    client: int
    door: str
    peer: str
    tenant: str = ""


class RpcRefused(NormalEvent, tag="rpc.refused", kw_only=True, gc=False):
    """Somebody was turned away before a call began; ``client`` is 0 for who was never let in."""

    door: str
    peer: str
    code: str
    why: str
    client: int = 0
    tenant: str = ""


class RpcCall(NormalEvent, tag="rpc.call", kw_only=True, gc=False):
    """A call is over.

    Attributes:
        call: its number, given by the server.
        method: ``generate``, ``pin`` and so on.
        code: ``ok``, ``cancelled``, or why it came to nothing.
        request: the engine's request that it became, if any.
    """

    client: int
    call: int
    method: str
    code: str
    request: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    wall_us: int = 0
    why: str = ""


class RpcClose(NormalEvent, tag="rpc.close", kw_only=True, gc=False):
    """A client has gone, or was sent away."""

    client: int
    reason: str
    calls: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


class RpcDrain(NormalEvent, tag="rpc.drain", kw_only=True, gc=False):
    """The doors take no more calls; at the end, how many were cut short."""

    state: Literal["begin", "end"]
    streams: int
    cut: int = 0
