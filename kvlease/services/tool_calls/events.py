"""What a parser of tool calls says about a stream, piece by piece."""

from typing import Literal, TypeAlias

import msgspec

Reason: TypeAlias = Literal[
    "syntax", "unknown_tool", "duplicate_parameter", "invalid_json", "schema", "truncated"
]
"""Why a call is malformed, as counters and logs name it."""


class Text(msgspec.Struct, frozen=True, gc=False):
    """Ordinary text of the answer."""

    text: str


class CallStarted(msgspec.Struct, frozen=True, gc=False):
    """The model calls a tool that exists; ``index`` counts the answer's calls from 0."""

    index: int
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments; joined, the deltas are the text of a JSON object."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, gc=False):
    """A call is whole, and its arguments are valid; they are repeated here in one piece."""

    index: int
    name: str
    arguments: str


class CallError(msgspec.Struct, frozen=True, gc=False):
    """The markup is malformed, or a call is not one that the tools allow; nothing follows.

    Attributes:
        reason: one word.
        message: one sentence that says what is wrong.
        raw: the answer's text from the start of the block to where the error was seen.
    """

    reason: Reason
    message: str
    raw: str


ParserEvent: TypeAlias = Text | CallStarted | ArgumentsDelta | CallEnded | CallError
