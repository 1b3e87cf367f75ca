"""The spelling of DeepSeek-V4's tool-call markup, and how a call is written in it.

A block stands behind the answer's text and two line ends. The bars are U+FF5C, not the ASCII bar::

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="edit">
    <｜DSML｜parameter name="path" string="true">a.c</｜DSML｜parameter>
    <｜DSML｜parameter name="line" string="false">42</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A parameter is text as it stands (``string="true"``) or JSON; an invocation may hold one JSON object
instead of parameters. The format has no escapes, so text that holds the closing tag of a parameter
is written as JSON. Source of the format: vllm #40801 and #53227, colibri #948.
"""

from collections.abc import Iterable

import msgspec
from attrs import frozen

DSML = "\uff5cDSML\uff5c"
"""The marker in every tag; in a checkpoint's vocabulary one token."""
OPEN, CLOSE = f"<{DSML}", f"</{DSML}"
BLOCK = "tool_calls"
BLOCK_END = f"{CLOSE}{BLOCK}>"
INVOKE_END = f"{CLOSE}invoke>"
PARAMETER_END = f"{CLOSE}parameter>"
SEPARATOR = "\n\n"
"""Line ends between an answer's text and its block; they belong to the markup."""


@frozen
class Call:
    """One tool call: ``arguments`` is the text of a JSON object, as clients have it."""

    name: str
    arguments: str


def arguments_of(text: str) -> dict[str, msgspec.Raw] | None:
    """Split the text of a JSON object into its members' texts; None if it is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _parameter(name: str, raw: str) -> str:
    value, is_text = raw, "false"
    if raw.startswith('"'):
        text = msgspec.json.decode(raw, type=str)
        if PARAMETER_END not in text:
            value, is_text = text, "true"
    return f'{OPEN}parameter name="{name}" string="{is_text}">{value}{PARAMETER_END}'


def write_call(call: Call) -> str:
    """Write one invocation; values that are no text stay letter by letter as they came.

    A call whose arguments are no JSON object, or have names that no attribute can hold, keeps its
    arguments as one piece.
    """
    members = arguments_of(call.arguments)
    if members is None or any('"' in name for name in members):
        body = call.arguments
    else:
        body = "\n".join(_parameter(n, bytes(raw).decode()) for n, raw in members.items())
    return f'{OPEN}invoke name="{call.name}">\n{body}\n{INVOKE_END}'


def write_block(calls: Iterable[Call]) -> str:
    """Write the block of an answer that makes calls, its separator not included."""
    return "\n".join([f"{OPEN}{BLOCK}>", *map(write_call, calls), BLOCK_END])
