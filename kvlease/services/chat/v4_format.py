"""DeepSeek-V4's prompt: the order of control tokens and text, as facts of the model.

::

    BOS system text, tools section  USER question  ASSISTANT </think>answer EOS  USER ...

Answers follow ``</think>``, or ``<think>`` and their reasoning. There is no tool role: results
stand in a user's turn, in the order of their calls. Turns that follow each other without an answer
between them are one. Sources: the encoding of the model's release as described in colibri #948 and
vllm #54677; ms-swift's and sglang's tests of it.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

from attrs import frozen

from kvlease.services.chat.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from kvlease.services.tool_calls.markup import BLOCK, DSML, OPEN, SEPARATOR, Call, write_block
from kvlease.services.tool_calls.tools import ToolSpec

BOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
THINK, THINK_END = "<think>", "</think>"


@frozen
class Control:
    """A control token by its spelling."""

    spelling: str


Piece = Control | str

_EXAMPLE = write_block([Call("NAME_OF_TOOL", '{"NAME_OF_PARAMETER": "VALUE"}')])
_TOOLS = (
    f"""## Tools

Tools can be called. A call is written behind the rest of the answer, in a block of this form:

{_EXAMPLE}

A block may hold several calls. Set string="true" for a parameter that is text, and write the text
as it is; set string="false" for anything else, and write it as JSON. Reason, if at all, before the
block and inside of {THINK} and {THINK_END}.

### Available Tool Schemas

""",
    """

Call only these tools, with parameters that fit their schemas.
""",
)
_MARKER = re.compile(f"({DSML})")
_CONTROLS = re.compile(f"({DSML}|{THINK}|{THINK_END})")
_RELEASED = Path("encoding") / "encoding_dsv4.py"
_CONSTANT = re.compile(r'^TOOLS_TEMPLATE = """(.*?)"""', re.DOTALL | re.MULTILINE)


@final
class ToolsSection:
    """The part of a prompt that lists tools.

    A checkpoint's own words for it, which the model was trained on, stand in a file that is
    released with it; where there is none, words of ours say the same.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Look for a checkpoint's words; its file is read as text and never run."""
        self._before, self._after = _TOOLS
        if folder is None:
            return
        try:
            found = _CONSTANT.search((folder / _RELEASED).read_text(encoding="utf-8"))
        except (OSError, UnicodeError):
            return
        if found is not None:
            before, schemas, after = _spelled(found.group(1)).partition("{tool_schemas}")
            if schemas:
                self._before, self._after = before, after

    def write(self, tools: Sequence[ToolSpec]) -> list[Piece]:
        """Write the section; one line of JSON a tool, members in their client's order."""
        lines = (json.dumps(_schema(tool), ensure_ascii=False) for tool in tools)
        return [*marked(self._before), "\n".join(lines), *marked(self._after)]


def _spelled(template: str) -> str:
    """Fill in what a checkpoint's words say by name."""
    for field, text in (
        ("dsml_token", DSML),
        ("thinking_start_token", THINK),
        ("thinking_end_token", THINK_END),
    ):
        template = template.replace(f"{{{field}}}", text)
    return template


def _schema(tool: ToolSpec) -> dict[str, object]:
    made: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        made["description"] = tool.description
    if tool.parameters is not None:
        made["parameters"] = tool.parameters
    return made


def system_pieces(
    messages: Sequence[Message], tools: Sequence[ToolSpec], section: ToolsSection
) -> list[Piece]:
    """Return how a prompt begins: the system messages it opens with, and its tools."""
    text = "\n\n".join(m.text for m in messages[: num_opening(messages)])
    return [Control(BOS), text, *(["\n\n", *section.write(tools)] if tools else [])]


def num_opening(messages: Sequence[Message]) -> int:
    """Count the system messages at a conversation's start."""
    return next(
        (n for n, m in enumerate(messages) if not isinstance(m, SystemMessage)), len(messages)
    )


def turn_pieces(turn: Sequence[Message], before: AssistantMessage | None) -> list[Piece]:
    """Return a user's turn: all that was said between two answers, results in call order."""
    order = {call_id: n for n, call_id in enumerate(before.call_ids if before else ())}
    results = iter(
        sorted(
            (m for m in turn if isinstance(m, ToolMessage)), key=lambda m: order.get(m.call_id, 0)
        )
    )
    parts = [
        f"<tool_result>{next(results).text}</tool_result>" if isinstance(m, ToolMessage) else m.text
        for m in turn
        if isinstance(m, UserMessage | SystemMessage | ToolMessage)
    ]
    return [Control(USER), "\n\n".join(parts)]


def head_pieces(*, is_thinking: bool) -> list[Piece]:
    """Return how an answer's place is marked."""
    return [Control(ASSISTANT), Control(THINK if is_thinking else THINK_END)]


def answer_pieces(message: AssistantMessage) -> list[Piece]:
    """Return an answer behind its head, up to the end mark."""
    pieces: list[Piece] = []
    if message.reasoning is not None:
        pieces += [message.reasoning, Control(THINK_END)]
    pieces.append(message.text)
    if message.calls:
        pieces += marked(SEPARATOR + write_block(message.calls), _MARKER)
    return [*pieces, Control(EOS)]


def forced_call(name: str | None) -> str:
    """Return the beginning of an answer that has to call a tool, a certain one if named."""
    invoke = f'{OPEN}invoke name="'
    return f"{SEPARATOR}{OPEN}{BLOCK}>\n{invoke}" + (f'{name}">\n' if name else "")


def marked(text: str, controls: "re.Pattern[str] | None" = None) -> Iterable[Piece]:
    """Cut words of ours into text and the control tokens that they spell."""
    for place, part in enumerate((controls or _CONTROLS).split(text)):
        yield Control(part) if place % 2 else part
