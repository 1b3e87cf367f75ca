"""The streaming parser of tool calls: text in any split, events out.

A pure state machine. Text that is no markup passes at once, but for a few characters that could
begin a tag or belong to one; quoted markup is text (`quoting`). Whatever else is in the markup's
spelling and not in its grammar ends the stream of events with one `CallError`: neither a leak nor a
loss. What is said does not depend on how the text was cut, and the time is linear in its length.
"""

import json
import re
from collections.abc import Callable
from typing import cast, final

from kvlease.services.tool_calls.events import (
    ArgumentsDelta,
    CallEnded,
    CallError,
    CallStarted,
    ParserEvent,
    Reason,
    Text,
)
from kvlease.services.tool_calls.markup import BLOCK, DSML, PARAMETER_END
from kvlease.services.tool_calls.quoting import QuoteTracker
from kvlease.services.tool_calls.strict_json import (
    MAX_DEPTH,
    DuplicateName,
    JsonError,
    JsonScanner,
    parse,
)
from kvlease.services.tool_calls.tools import NO_TOOLS, Toolbox

MAX_TAG = 512
"""Characters of the longest tag that is waited for."""

_MARK = re.compile(f"\n{{0,2}}</?{DSML}")
_PARTIAL_MARK = re.compile("\n{0,2}(?:</?(?:\uff5c(?:D(?:S(?:M(?:L)?)?)?)?)?)?\\Z")
_LONGEST_MARK = len(f"\n\n</{DSML}")
_TAG_END = re.compile(r'[^">]*(?:"[^"]*"[^">]*)*>')
_TAG = re.compile(rf'<(/?){DSML}([a-z_]+)((?: [a-z_]+="[^"]*")*)>')
_ATTRIBUTE = re.compile(r' ([a-z_]+)="([^"]*)"')
_SPACE = re.compile(r"\s*")


class _Malformed(Exception):
    """The grammar is broken; ends at the parser's own edge."""

    def __init__(self, reason: Reason, message: str, end: int) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.message = message
        self.end = end


def _partial_length(buffer: str, place: int, tag: str) -> int:
    """Return how many characters at the buffer's end, from ``place`` on, could begin the tag."""
    start = buffer.rfind("<", max(place, len(buffer) - len(tag) + 1))
    return len(buffer) - start if start >= 0 and tag.startswith(buffer[start:]) else 0


@final
class ToolCallParser:
    """Reads one answer; feed it text, then finish it."""

    def __init__(self, tools: Toolbox = NO_TOOLS) -> None:
        """Borrows the tools that calls are checked against."""
        self._tools = tools
        self._quotes = QuoteTracker()
        self._state: Callable[[str, int], int] = self._text
        self._rest = ""
        self._raw: list[str] = []
        self._out: list[ParserEvent] = []
        self._num_calls = 0
        self._begin_call("")

    @property
    def has_failed(self) -> bool:
        """Whether an error was found; nothing more will be said."""
        return self._state == self._failed

    def ends_in_markup(self) -> bool:
        """Return whether an answer that ends here is cut inside of a block that is meant.

        Two characters of the mark begin one.
        """
        if self._state != self._text or DSML[:2] not in self._rest:
            return self._state != self._text
        self._quotes.feed(self._rest.partition("<")[0])
        return not self._quotes.quotes_next()

    def feed(self, text: str) -> list[ParserEvent]:
        """Return what the next piece of the answer adds."""
        buffer, place = self._rest + text, 0
        try:
            while place < len(buffer):
                start, state = place, self._state
                place = state(buffer, start)
                if state != self._text:
                    self._raw.append(buffer[start:place])
                if place == start and self._state == state:
                    break
        except _Malformed as error:
            self._raw.append(buffer[place : error.end])
            self._fail(error.reason, error.message)
            place = len(buffer)
        self._rest = buffer[place:]
        out, self._out = self._out, []
        return out

    def finish(self) -> list[ParserEvent]:
        """Return what the end of the answer adds: held text, or an error inside of markup."""
        if not self.ends_in_markup():
            if self._rest:
                self._out.append(Text(self._rest))
        elif not self.has_failed:
            self._raw = [*([] if self._state == self._text else self._raw), self._rest]
            self._fail("truncated", "the answer ends inside of tool-call markup")
        self._rest = ""
        self._state = self._failed
        out, self._out = self._out, []
        return out

    def _fail(self, reason: Reason, message: str) -> None:
        self._out.append(CallError(reason, message, "".join(self._raw)))
        self._state = self._failed

    def _failed(self, buffer: str, place: int) -> int:
        return len(buffer)

    def _text(self, buffer: str, place: int) -> int:
        """Pass text on up to markup that is meant; returns where to go on."""
        match = _MARK.search(buffer, place)
        if match is None:
            partial = _PARTIAL_MARK.search(buffer, max(place, len(buffer) - _LONGEST_MARK))
            assert partial is not None, "the pattern matches the empty end"
            self._say_text(buffer[place : partial.start()])
            return partial.start()
        tag = match.start() + (len(match.group()) - len(match.group().lstrip("\n")))
        self._say_text(buffer[place : match.start()])
        line_ends = buffer[match.start() : tag]
        self._quotes.feed(line_ends)
        if self._quotes.quotes_next():
            self._quotes.feed(buffer[tag : match.end()])
            self._out.append(Text(buffer[match.start() : match.end()]))
            return match.end()
        self._raw = [line_ends]
        self._state = self._outer_tag
        return tag

    def _say_text(self, text: str) -> None:
        if text:
            self._quotes.feed(text)
            self._out.append(Text(text))

    def _read_tag(self, buffer: str, place: int) -> tuple[str, dict[str, str], int] | None:
        """Read the tag at ``place``: name with a slash if it closes, attributes, end.

        None while it is not whole.
        """
        match = _TAG_END.match(buffer, place, place + MAX_TAG)
        if match is None:
            if len(buffer) - place < MAX_TAG:
                return None
            raise _Malformed("syntax", f"a tag of over {MAX_TAG} characters", place + MAX_TAG)
        end = match.end()
        tag = _TAG.fullmatch(buffer, place, end)
        if tag is None:
            raise _Malformed("syntax", f"{match.group()!r} is no tag of the markup", end)
        pairs = _ATTRIBUTE.findall(tag.group(3))
        attributes: dict[str, str] = dict(pairs)
        if len(attributes) != len(pairs):
            raise _Malformed("syntax", f"{match.group()!r} has an attribute twice", end)
        return tag.group(1) + tag.group(2), attributes, end

    def _outer_tag(self, buffer: str, place: int) -> int:
        """Read a tag that follows text: a block begins, or it is out of place."""
        tag = self._read_tag(buffer, place)
        if tag is None:
            return place
        name, attributes, end = tag
        if name != BLOCK or attributes:
            raise _Malformed("syntax", f"{buffer[place:end]!r} outside of a block of calls", end)
        self._state = self._between_calls
        return end

    def _skip_to_tag(self, buffer: str, place: int, also: str = "") -> int:
        """Return where the next tag begins, or the end of the buffer; raises at other text."""
        match = _SPACE.match(buffer, place)
        assert match is not None, "the pattern matches the empty string"
        place = match.end()
        if place < len(buffer) and buffer[place] not in "<" + also:
            raise _Malformed("syntax", f"{buffer[place]!r} where a tag has to be", place + 1)
        return place

    def _between_calls(self, buffer: str, place: int) -> int:
        """Read an invocation's opening tag, or the block's end."""
        start = self._skip_to_tag(buffer, place)
        if start > place or start == len(buffer):
            return start
        tag = self._read_tag(buffer, start)
        if tag is None:
            return start
        name, attributes, end = tag
        if name == f"/{BLOCK}" and not attributes:
            self._quotes.new_line()
            self._state = self._text
        elif name == "invoke" and attributes.keys() == {"name"}:
            if attributes["name"] not in self._tools:
                raise _Malformed("unknown_tool", f"no tool {attributes['name']!r} is offered", end)
            self._begin_call(attributes["name"])
            self._out.append(CallStarted(self._num_calls, self._name))
            self._state = self._call_body
        else:
            raise _Malformed("syntax", f"{buffer[start:end]!r} where a call has to begin", end)
        return end

    def _begin_call(self, name: str) -> None:
        self._name = name
        self._arguments: list[str] = []
        self._values: dict[str, object] = {}
        self._is_object = False
        self._parameter = ""
        self._piece: list[str] = []
        self._json = JsonScanner()

    def _say(self, text: str) -> None:
        if text:
            self._arguments.append(text)
            self._out.append(ArgumentsDelta(self._num_calls, text))

    def _call_body(self, buffer: str, place: int) -> int:
        """Read a parameter's opening tag, the start of an object, or the call's end."""
        start = self._skip_to_tag(buffer, place, "" if self._arguments else "{")
        if start > place or start == len(buffer):
            return start
        if buffer[start] == "{":
            self._state = self._object
            return start
        tag = self._read_tag(buffer, start)
        if tag is None:
            return start
        name, attributes, end = tag
        if name == "/invoke" and not attributes:
            self._end_call(end)
        elif (
            name == "parameter" and attributes.keys() == {"name", "string"} and not self._is_object
        ):
            self._begin_parameter(attributes, end)
        else:
            raise _Malformed("syntax", f"{buffer[start:end]!r} does not belong in a call", end)
        return end

    def _end_call(self, end: int) -> None:
        if not self._is_object:
            self._say("}" if self._values else "{}")
        complaint = self._tools.complaint(self._name, self._values)
        if complaint is not None:
            raise _Malformed("schema", f"the arguments of {self._name!r}: {complaint}", end)
        self._out.append(CallEnded(self._num_calls, self._name, "".join(self._arguments)))
        self._num_calls += 1
        self._state = self._between_calls

    def _begin_parameter(self, attributes: dict[str, str], end: int) -> None:
        name, is_text = attributes["name"], attributes["string"]
        if name in self._values:
            raise _Malformed("duplicate_parameter", f"parameter {name!r} appears twice", end)
        if is_text not in ("true", "false"):
            raise _Malformed("syntax", f"string={is_text!r} is neither true nor false", end)
        self._parameter, self._piece, self._json = name, [], JsonScanner()
        before = ", " if self._values else "{"
        quote = '"' if is_text == "true" else ""
        self._say(f"{before}{json.dumps(name, ensure_ascii=False)}: {quote}")
        self._state = self._text_value if is_text == "true" else self._json_value

    def _text_value(self, buffer: str, place: int) -> int:
        """Pass a parameter's text on, as part of a JSON string, up to its closing tag."""
        end = buffer.find(PARAMETER_END, place)
        is_whole = end >= 0
        if not is_whole:
            end = len(buffer) - _partial_length(buffer, place, PARAMETER_END)
        text = buffer[place:end]
        self._piece.append(text)
        self._say(json.dumps(text, ensure_ascii=False)[1:-1])
        if not is_whole:
            return end
        self._values[self._parameter] = "".join(self._piece)
        self._say('"')
        self._state = self._call_body
        return end + len(PARAMETER_END)

    def _json_value(self, buffer: str, place: int) -> int:
        """Pass a parameter's JSON on as it stands, up to a closing tag outside of its strings."""
        stop = self._scan_json(buffer, place)
        if stop > place or stop == len(buffer):
            return stop
        if PARAMETER_END.startswith(buffer[stop : stop + len(PARAMETER_END)]):
            end = stop + len(PARAMETER_END)
            if len(buffer) < end:
                return stop
            self._values[self._parameter] = self._parsed(end)
            self._state = self._call_body
            return end
        raise _Malformed("invalid_json", f"'<' in the value of {self._parameter!r}", stop + 1)

    def _object(self, buffer: str, place: int) -> int:
        """Pass arguments that are one JSON object on as they stand, up to its last bracket."""
        stop = self._scan_json(buffer, place)
        if self._json.depth <= 0:
            value = self._parsed(stop)
            assert isinstance(value, dict), "it began with a brace and is valid"
            self._values, self._is_object = cast("dict[str, object]", value), True
            self._state = self._call_body
        elif stop == place:
            raise _Malformed("invalid_json", "'<' in the arguments", stop + 1)
        return stop

    def _scan_json(self, buffer: str, place: int) -> int:
        stop = self._json.scan(buffer, place)
        self._piece.append(buffer[place:stop])
        self._say(buffer[place:stop])
        if self._json.depth == MAX_DEPTH and buffer[stop : stop + 1] in ("{", "["):
            raise _Malformed("invalid_json", f"it nests deeper than {MAX_DEPTH}", stop + 1)
        return stop

    def _parsed(self, end: int) -> object:
        try:
            return parse("".join(self._piece))
        except DuplicateName as error:
            raise _Malformed("duplicate_parameter", f"the arguments: {error}", end) from error
        except JsonError as error:
            raise _Malformed("invalid_json", f"the arguments: {error}", end) from error
