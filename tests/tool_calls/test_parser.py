"""The parser of tool calls: any split says the same, nothing leaks, nothing is lost."""

import gc
import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvlease.services.tool_calls.events import (
    ArgumentsDelta,
    CallEnded,
    CallError,
    CallStarted,
    ParserEvent,
    Text,
)
from kvlease.services.tool_calls.markup import (
    BLOCK,
    BLOCK_END,
    CLOSE,
    DSML,
    INVOKE_END,
    OPEN,
    PARAMETER_END,
    SEPARATOR,
    Call,
    write_block,
)
from kvlease.services.tool_calls.parser import MAX_TAG, ToolCallParser
from kvlease.services.tool_calls.strict_json import MAX_DEPTH
from kvlease.services.tool_calls.tools import Toolbox, ToolSpec

EDIT = ToolSpec(
    "edit",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string"}, "line": {"type": "integer", "minimum": 1}},
        "required": ["path"],
        "additionalProperties": False,
    },
)
ANYTHING = ToolSpec("anything")
TOOLS = Toolbox([EDIT, ANYTHING])
BLOCK_START = f"{OPEN}{BLOCK}>"


def parameter(name: str, value: str, is_text: str = "true") -> str:
    return f'{OPEN}parameter name="{name}" string="{is_text}">{value}{PARAMETER_END}'


def invoke(body: str, name: str = "anything") -> str:
    return f'{OPEN}invoke name="{name}">\n{body}\n{INVOKE_END}'


def block(*calls: str) -> str:
    return "\n".join([BLOCK_START, *calls, BLOCK_END])


def merged(events: list[ParserEvent]) -> list[ParserEvent]:
    """The same events with neighbouring pieces joined, as their reader would."""
    out: list[ParserEvent] = []
    for event in events:
        last = out[-1] if out else None
        match event, last:
            case Text(), Text():
                out[-1] = Text(last.text + event.text)
            case ArgumentsDelta(), ArgumentsDelta():
                out[-1] = ArgumentsDelta(event.index, last.text + event.text)
            case _:
                out.append(event)
    return out


def parsed(pieces: list[str], tools: Toolbox = TOOLS) -> list[ParserEvent]:
    parser = ToolCallParser(tools)
    said = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*said, *parser.finish()])


def calls_in(events: list[ParserEvent]) -> list[tuple[str, object]]:
    return [(e.name, json.loads(e.arguments)) for e in events if isinstance(e, CallEnded)]


def error_in(text: str, tools: Toolbox = TOOLS) -> CallError:
    events = parsed([text], tools)
    assert isinstance(events[-1], CallError), events
    assert parsed(list(text), tools) == events
    return events[-1]


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


LOOK_ALIKES = st.sampled_from(
    [
        OPEN,
        CLOSE,
        BLOCK_START,
        INVOKE_END,
        "<|DSML|tool_calls>",
        DSML,
        "<",
        "</",
        "\n\n",
        "\uff5c",
        "`",
    ]
)
PROSE = st.lists(st.one_of(st.text(max_size=12), LOOK_ALIKES), max_size=6).map("".join)
PLAIN = PROSE.map(lambda text: text.replace(OPEN, "").replace(CLOSE, "").replace("`", ""))
ARGUMENT_TEXT = PROSE.map(lambda text: text.replace(PARAMETER_END, ""))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | PROSE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PROSE, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: '"' not in name)
CALLS = st.builds(
    lambda members: Call("anything", json.dumps(members, ensure_ascii=False)),
    st.dictionaries(NAMES, ARGUMENT_TEXT | VALUES, max_size=4),
)


@given(st.data(), PLAIN, st.lists(CALLS, max_size=3), PLAIN)
def test_any_split_of_any_valid_stream_says_the_same(
    data: st.DataObject, before: str, calls: list[Call], after: str
) -> None:
    """Chunk borders fall anywhere; a call that depends on them is a call that garbles."""
    before = before.rstrip("\"'“\u2018«「『~")
    text = before + (SEPARATOR + write_block(calls) + after if calls else "")
    whole = parsed([text])
    assert parsed(data.draw(cuts(text))) == whole
    assert parsed(list(text)) == whole
    if DSML[:2] in text[-8:]:
        return  # it ends like a tag that is cut off
    assert [e for e in whole if isinstance(e, CallError)] == []
    assert calls_in(whole) == [(c.name, json.loads(c.arguments)) for c in calls]
    said = "".join(e.text for e in whole if isinstance(e, Text))
    assert said == before + (after if calls else "")
    deltas = [e.text for e in whole if isinstance(e, ArgumentsDelta)]
    assert deltas == [e.arguments for e in whole if isinstance(e, CallEnded)]


FRAGMENTS = st.sampled_from(
    [
        BLOCK_START,
        BLOCK_END,
        INVOKE_END,
        PARAMETER_END,
        f'{OPEN}invoke name="anything">',
        f'{OPEN}invoke name="edit">',
        f'{OPEN}parameter name="path" string="true">',
        f'{OPEN}parameter name="line" string="false">',
        *'{}[]":,\\<>1`\n~',
        "```\n",
        '{"a": 1}',
        '"a<b"',
        OPEN[:4],
    ]
)


@given(st.data(), st.lists(st.one_of(FRAGMENTS, st.text(max_size=4)), max_size=14).map("".join))
@example(None, block(invoke("[1][2]")))
def test_a_garbled_stream_raises_nothing_and_loses_nothing(
    data: st.DataObject | None, text: str
) -> None:
    """Whatever a broken model writes ends as events; what is no call is said or in the error."""
    whole = parsed([text])
    assert parsed(list(text)) == whole
    if data is not None:
        assert parsed(data.draw(cuts(text))) == whole
    errors = [e for e in whole if isinstance(e, CallError)]
    assert errors == [e for e in whole[-1:] if isinstance(e, CallError)]
    if BLOCK_END not in text:  # so that everything is said as text, or in the error
        said = "".join(e.text for e in whole if isinstance(e, Text))
        assert text.startswith(said + errors[0].raw) if errors else text == said


def test_a_call_as_the_model_writes_it() -> None:
    text = (
        "Let me look."
        + SEPARATOR
        + block(
            invoke(parameter("path", "a/b.c") + "\n" + parameter("line", "42", "false"), "edit"),
            invoke('{"deep": {"list": [1, "</\uff5cDSML\uff5cinvoke>"]}}'),
            invoke(""),
        )
    )
    assert parsed([text]) == [
        Text("Let me look."),
        CallStarted(0, "edit"),
        ArgumentsDelta(0, '{"path": "a/b.c", "line": 42}'),
        CallEnded(0, "edit", '{"path": "a/b.c", "line": 42}'),
        CallStarted(1, "anything"),
        ArgumentsDelta(1, '{"deep": {"list": [1, "</\uff5cDSML\uff5cinvoke>"]}}'),
        CallEnded(1, "anything", '{"deep": {"list": [1, "</\uff5cDSML\uff5cinvoke>"]}}'),
        CallStarted(2, "anything"),
        ArgumentsDelta(2, "{}"),
        CallEnded(2, "anything", "{}"),
    ]


def test_arguments_stream_as_they_come() -> None:
    """A long file that is written by a call must not wait for its last line."""
    parser = ToolCallParser(TOOLS)
    head = f'{BLOCK_START}\n{OPEN}invoke name="edit">\n{OPEN}parameter name="path" string="true">'
    parser.feed(head)
    assert parser.feed('line "one"\n') == [ArgumentsDelta(0, 'line \\"one\\"\\n')]


@pytest.mark.parametrize(
    "text",
    [
        f"Calls look like `{BLOCK_START}` in V4.",
        f"```xml\n{BLOCK_START}\n{invoke('')}\n{BLOCK_END}\n```\nThat was it.",
        f'One writes "{BLOCK_START} … {BLOCK_END}" around calls.',
        f"~~~\n{CLOSE}parameter>\n~~~",
        f"``a ` {OPEN}invoke`` b",
        "a <|DSML|tool_calls> with the wrong bars, and < and </ and <\uff5c",
        "a < b\n\n",
    ],
)
def test_quoted_look_alikes_are_text(text: str) -> None:
    """An answer may explain the markup; what it says must arrive."""
    assert parsed([text]) == [Text(text)]
    assert parsed(list(text)) == [Text(text)]


def test_what_is_behind_a_quotation_is_meant_again() -> None:
    text = f"`{BLOCK_START}` begins one." + SEPARATOR + block(invoke(""))
    assert calls_in(parsed([text])) == [("anything", {})]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (block(invoke("", "rm")), "unknown_tool"),
        (block(invoke(parameter("a", "1") + parameter("a", "2"))), "duplicate_parameter"),
        (block(invoke('{"a": 1, "a": 2}')), "duplicate_parameter"),
        (block(invoke(parameter("a", "{", "false"))), "invalid_json"),
        (block(invoke(parameter("a", "", "false"))), "invalid_json"),
        (block(invoke(parameter("a", "NaN", "false"))), "invalid_json"),
        (block(invoke(parameter("a", '"\\ud800"', "false"))), "invalid_json"),
        (block(invoke(parameter("a", "1 < 2", "false"))), "invalid_json"),
        (block(invoke('{"a": }')), "invalid_json"),
        (block(invoke(parameter("a", "[" * (MAX_DEPTH + 1), "false"))), "invalid_json"),
        (block(invoke(parameter("line", "1", "false"), "edit")), "schema"),
        (block(invoke(parameter("path", "a") + parameter("line", "0", "false"), "edit")), "schema"),
        (block(invoke(parameter("a", "1", "yes"))), "syntax"),
        (block(invoke('{"a": 1}' + parameter("b", "1"))), "syntax"),
        (block(invoke(parameter("b", "1") + '{"a": 1}')), "syntax"),
        (block(invoke(parameter("a", "1") + "garbage")), "syntax"),
        (block("garbage"), "syntax"),
        (f"{BLOCK_START}\n<b>", "syntax"),
        (f"Sure. {INVOKE_END}", "syntax"),
        (f'Sure. {OPEN}invoke name="anything">', "syntax"),
        (f"{OPEN}tool_call>", "syntax"),
        (BLOCK_START + "<" + "x" * MAX_TAG, "syntax"),
        (f"{OPEN}tool", "truncated"),
        ("I call <\uff5cDSM", "truncated"),
        (block(invoke(""))[:-1], "truncated"),
        (block(invoke(parameter("a", "text"))).partition("ext")[0], "truncated"),
        (f"{BLOCK_START}\n", "truncated"),
    ],
)
def test_malformed_calls_are_errors(text: str, reason: str) -> None:
    """A garbled call is the first symptom of a corrupt cache: never text, never silence."""
    error = error_in(text)
    assert error.reason == reason
    assert error.raw
    assert error.raw in text
    assert error.message


def test_nothing_follows_an_error() -> None:
    parser = ToolCallParser(TOOLS)
    events = parser.feed(block(invoke("", "rm")) + "more text")
    assert [type(e) for e in events] == [CallError]
    assert parser.has_failed
    assert parser.feed(block(invoke(""))) == []
    assert parser.finish() == []


def test_text_around_calls_is_kept() -> None:
    text = "a\n" + SEPARATOR + block(invoke("")) + "b" + SEPARATOR + block(invoke("")) + "\nc"
    said = [e.text for e in parsed([text]) if isinstance(e, Text)]
    assert said == ["a\n", "b", "\nc"]


@pytest.mark.parametrize(
    "text",
    [
        "<" * 60_000,
        "\n" * 60_000,
        "`" * 60_000,
        "</\uff5cDSM" * 9_000,
        BLOCK_START + invoke(parameter("a", "</\uff5cDSML\uff5cparamete" * 4_000)),
        BLOCK_START + invoke('{"a": "' + "\\\\" * 30_000 + '"}'),
        BLOCK_START + " " * 60_000,
        BLOCK_START + invoke(parameter("a", "[" + "[],\n" * 15_000 + "1]", "false")),
    ],
    ids=range(8),
)
def test_time_is_linear(text: str) -> None:
    """One token at a time, the size of a long answer: no step may look at all of it again."""

    def seconds(part: str) -> float:
        begun = time.thread_time()
        parsed(list(part))
        return time.thread_time() - begun

    def least(part: str) -> float:
        return min(seconds(part) for _ in range(3))

    gc.disable()  # a collection looks at what all tests have left
    try:
        assert least(text) < 8 * least(text[: len(text) // 4]) + 0.05, "four times is linear"
    finally:
        gc.enable()
