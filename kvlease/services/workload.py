"""The built-in workload: tool-calling agent sessions as byte-level text, from a seed.

All sessions share one long system prompt with the descriptions of their tools. Each then works on
a task of its own: a turn asks the model, and the next turn adds the result of a tool, short or
long, behind the answer. That is the shape that evicts and restores prefixes most: a common root,
and private histories that are set aside while a tool runs. This module knows no engine.
"""

import json
import random
from collections.abc import Iterator

from attrs import frozen

from kvlease.errors import ConfigError
from kvlease.protocols.config import SamplingParams
from kvlease.services.sessions import Session, Tokens, Turn, pack
from kvlease.services.tool_calls.events import CallError
from kvlease.services.tool_calls.markup import DSML
from kvlease.services.tool_calls.parser import ToolCallParser
from kvlease.services.tool_calls.tools import Toolbox, ToolSpec

_TOOLS = (
    ("read_file", "Return the text of a file between two lines.", ("path", "first", "last")),
    ("search", "List the places that match a regular expression.", ("pattern", "folder")),
    ("run_tests", "Run the tests of a folder and return the failures.", ("folder", "filter")),
    ("write_patch", "Apply a unified diff and return the files it touched.", ("diff",)),
    ("query_table", "Run a query over a read-only table, up to 200 rows.", ("sql", "limit")),
    ("fetch_ticket", "Return a ticket with its comments, oldest first.", ("ticket",)),
)
_RULES = (
    "Work in small steps and call one tool at a time.",
    "Quote the lines that a conclusion rests on.",
    "When a result is cut short, ask for the rest before judging it.",
    "Never invent a path, a table or a ticket number.",
    "Stop when the task's own test passes.",
)
# fmt: off
_WORDS = (
    "cache", "page", "lease", "epoch", "window", "prefix", "layer", "index", "scale", "stride",
    "token", "batch", "queue", "retry", "commit", "branch", "parser", "buffer", "socket", "thread",
    "signal", "timer", "ledger", "quota", "shard", "replica", "schema", "column", "filter",
)
# fmt: on
_MARK = DSML[:2].encode()
"""What every tag of tool-call markup begins with; answers that have none are not read."""


@frozen
class WorkloadShape:
    """How large the built-in sessions are; all sizes are tokens, of one byte each.

    Attributes:
        turns: requests a session makes.
        system_tokens: length of the shared system prompt.
        task_tokens: range of the private task behind it.
        result_tokens: range of a tool's result.
        answer_tokens: range of an answer.
        pause_s: longest run time of a tool, in seconds.
    """

    turns: int = 3
    system_tokens: int = 768
    task_tokens: tuple[int, int] = (48, 160)
    result_tokens: tuple[int, int] = (32, 320)
    answer_tokens: tuple[int, int] = (12, 28)
    pause_s: float = 0.05

    def __attrs_post_init__(self) -> None:
        """Refuse sizes that make no session."""
        if self.turns < 1:
            raise ConfigError(f"turns is {self.turns}; give a number of 1 or more")
        if self.system_tokens < 1:
            raise ConfigError(f"system_tokens is {self.system_tokens}; give a number of 1 or more")
        for name in ("task_tokens", "result_tokens", "answer_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigError(
                    f"{name} is {low} to {high}; give a range that starts at 1 or more"
                )

    @property
    def longest(self) -> int:
        """Tokens of the longest possible session, answers included."""
        private = self.task_tokens[1] + (self.turns - 1) * self.result_tokens[1]
        return self.system_tokens + private + self.turns * self.answer_tokens[1]


def encode_bytes(text: str, vocab_size: int) -> Tokens:
    """Turn text into one token a UTF-8 byte; a vocabulary under 256 folds the bytes into it."""
    return pack(byte % vocab_size for byte in text.encode())


def _tool_name(number: int) -> str:
    """Name a tool of the prompt; those behind the first few are versions of them."""
    version = number // len(_TOOLS) + 1
    return _TOOLS[number % len(_TOOLS)][0] + (f"_v{version}" if version > 1 else "")


def system_prompt(length: int) -> str:
    """Return the shared prompt: rules, then tool descriptions, repeated with numbers to length."""
    parts = ["<system>You are a careful engineer with tools.\n"]
    parts += [f"Rule {number}. {rule}\n" for number, rule in enumerate(_RULES, 1)]
    size = sum(map(len, parts))
    number = 0
    while size < length:
        _, purpose, arguments = _TOOLS[number % len(_TOOLS)]
        tool = {
            "name": _tool_name(number),
            "description": purpose,
            "parameters": {argument: {"type": "string"} for argument in arguments},
        }
        parts.append(f"<tool>{json.dumps(tool)}</tool>\n")
        size += len(parts[-1])
        number += 1
    return "".join(parts)[:length]


def _prose(rng: random.Random, length: int) -> str:
    """Words and numbers of exactly this length, as logs and listings have them."""
    parts: list[str] = []
    size = 0
    while size < length:
        parts.append(f"{rng.choice(_WORDS)}-{rng.randrange(1000)} ")
        size += len(parts[-1])
    return "".join(parts)[:length]


def _framed(tag: str, text: str, length: int) -> str:
    """Put text into a tag pair where the length has room for it, cut to the length exactly."""
    frame = f"</{tag}>\n"
    room = max(0, length - len(tag) - 2 - len(frame))
    return (f"<{tag}>{text[:room]}{frame}")[:length]


def tool_agent_sessions(
    count: int, shape: WorkloadShape, vocab_size: int, seed: int
) -> Iterator[Session]:
    """Yield the built-in sessions; the same arguments give the same bytes.

    Every second session draws its answers at a temperature, the others are greedy, so that both
    ways of drawing are under test. Answers go on through EOS: their length is the workload's.
    """
    system = system_prompt(shape.system_tokens)
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        turns: list[Turn] = []
        for turn in range(shape.turns):
            if turn == 0:
                size = rng.randint(*shape.task_tokens)
                text = system + _framed("task", f"Ticket {number}: {_prose(rng, size)}", size)
            else:
                size = rng.randint(*shape.result_tokens)
                text = _framed("tool_result", _prose(rng, size), size)
            sampling = SamplingParams(
                max_tokens=rng.randint(*shape.answer_tokens),
                temperature=0.8 if number % 2 else 0.0,
                seed=rng.randrange(1 << 31),
                ignore_eos=True,
            )
            pause_s = rng.uniform(0.0, shape.pause_s) if turn else 0.0
            turns.append(Turn(encode_bytes(text, vocab_size), sampling, pause_s))
        yield Session(f"session {number + 1}", tuple(turns))


def has_markup_error(answer: bytes) -> bool:
    """Tell whether an answer's tool-call markup is malformed, or calls a tool that is not there."""
    if _MARK not in answer:
        return False
    parser = ToolCallParser(Toolbox(ToolSpec(_tool_name(number)) for number in range(100)))
    events = parser.feed(answer.decode(errors="replace")) + parser.finish()
    return any(isinstance(event, CallError) for event in events)
