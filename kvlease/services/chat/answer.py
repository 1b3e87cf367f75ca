"""An answer's tokens to what its client is told: reasoning, text, calls; stop strings end it."""

from typing import final

import msgspec

from kvlease.services.chat.detokenizer import Detokenizer
from kvlease.services.chat.messages import AssistantMessage
from kvlease.services.chat.stops import StopFinder
from kvlease.services.chat.v4_format import THINK_END
from kvlease.services.chat.vocabulary import Vocabulary
from kvlease.services.tool_calls.events import CallEnded, CallError, ParserEvent, Text
from kvlease.services.tool_calls.markup import Call
from kvlease.services.tool_calls.parser import ToolCallParser


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text that the model reasons with, before its answer."""

    text: str


AnswerEvent = Reasoning | ParserEvent


@final
class AnswerReader:
    """Reads one answer token by token; a pure state machine.

    Stop strings are looked for in text and reasoning as the model writes them, markup included.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: StopFinder,
        parser: ToolCallParser | None,
        *,
        is_thinking: bool = False,
        forced: str = "",
    ) -> None:
        """Borrows the vocabulary; without a parser all text is text."""
        self._detokenizer = Detokenizer(vocabulary)
        self._stops = stops
        self._parser = parser
        self._thought = StopFinder([THINK_END]) if is_thinking else None
        self._texts: list[str] = []
        self._reasoning: list[str] | None = [] if is_thinking else None
        self._calls: list[Call] = []
        self.error: CallError | None = None
        self.early = self._parse(forced) if forced else []
        """What the forced beginning of an answer says already."""

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string, or an error, has ended the answer."""
        return self._stops.found is not None or self.error is not None

    @property
    def has_calls(self) -> bool:
        """Whether the answer has made a call."""
        return bool(self._calls)

    def feed(self, token: int) -> list[AnswerEvent]:
        """Return what a token adds."""
        return self._read(self._stops.feed(self._detokenizer.feed(token)))

    def finish(self) -> list[AnswerEvent]:
        """Return what the answer's end adds."""
        events = self._read(self._stops.finish())
        # Half a character would make a call wrong that the answer's end has only cut off.
        is_call = self._parser is not None and self._parser.ends_in_markup()
        if self._stops.found is None and not is_call:
            events += self._read(self._detokenizer.finish())
        if self._thought is not None:
            events += self._reason(self._thought.finish())
        if self._parser is not None and self.error is None:
            events += self._keep(self._parser.finish())
        return events

    def message(self, call_ids: tuple[str, ...] = ()) -> AssistantMessage:
        """Return the answer as its client keeps it."""
        reasoning = None if self._reasoning is None else "".join(self._reasoning)
        return AssistantMessage("".join(self._texts), tuple(self._calls), call_ids, reasoning)

    def _read(self, text: str) -> list[AnswerEvent]:
        if not text or self.error is not None:
            return []
        if self._thought is None:
            return self._parse(text)
        thought = self._thought
        said = thought.feed(text)
        events = self._reason(said)
        if thought.found is not None:
            self._thought = None
            events += self._parse(thought.rest)
        return events

    def _reason(self, text: str) -> list[AnswerEvent]:
        if not text or self._reasoning is None:
            return []
        self._reasoning.append(text)
        return [Reasoning(text)]

    def _parse(self, text: str) -> list[AnswerEvent]:
        if not text:
            return []
        return self._keep([Text(text)] if self._parser is None else self._parser.feed(text))

    def _keep(self, events: list[ParserEvent]) -> list[AnswerEvent]:
        for event in events:
            match event:
                case Text():
                    self._texts.append(event.text)
                case CallEnded():
                    self._calls.append(Call(event.name, event.arguments))
                case CallError():
                    self.error = event
                case _:
                    pass
        return list(events)
