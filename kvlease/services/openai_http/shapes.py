"""Answers and pieces of them in the protocol's shapes: chat, and the older completions."""

import secrets
from typing import Protocol, final

from kvlease.runtime.request import TokenEvent
from kvlease.services.chat.answer import Reasoning
from kvlease.services.chat.vocabulary import Vocabulary
from kvlease.services.openai_http.answering import Answered, Told
from kvlease.services.openai_http.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    DeltaOut,
    FinishReason,
    FunctionOut,
    MessageOut,
    Reply,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    ToolCallOut,
    TopLogprob,
    UsageOut,
)
from kvlease.services.tool_calls.events import ArgumentsDelta, CallStarted, Text


class Shape(Protocol):
    """Puts one request's answers into a form."""

    def open(self, reply: Reply, index: int) -> bool:
        """Fill in what begins an answer's stream; returns whether it is anything to be said."""
        ...

    def piece(self, reply: Reply, told: Told) -> bool:
        """Fill in what was told; returns whether it is anything to be said."""
        ...

    def close(self, reply: Reply, index: int, reason: FinishReason) -> None:
        """Fill in how an answer's stream ends."""
        ...

    def whole(self, reply: Reply, answers: list[Answered]) -> None:
        """Fill in answers in one piece; their pieces were seen before."""
        ...


def new_reply(prefix: str, kind: str, created: int, model: str, fingerprint: str) -> Reply:
    """Return a reply without choices, under an id of its own."""
    return Reply(f"{prefix}-{secrets.token_hex(12)}", kind, created, model, fingerprint, [])


def with_usage(reply: Reply, usage: UsageOut) -> Reply:
    """Return the reply that tells a stream's usage."""
    return Reply(
        reply.id, reply.object, reply.created, reply.model, reply.system_fingerprint, [], usage
    )


@final
class ChatShape:
    """Messages and deltas."""

    def __init__(self, vocabulary: Vocabulary, *, has_logprobs: bool) -> None:
        """Borrows the vocabulary, which spells tokens that log-probabilities name."""
        self._vocabulary = vocabulary
        self._has_logprobs = has_logprobs
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._call_ids: dict[int, list[str]] = {}

    def call_ids(self, index: int) -> tuple[str, ...]:
        """Return the ids of an answer's calls, in order."""
        return tuple(self._call_ids.get(index, ()))

    def open(self, reply: Reply, index: int) -> bool:
        """Name the role."""
        reply.choices = [ChatChunkChoice(index, DeltaOut(role="assistant", content=""))]
        return True

    def piece(self, reply: Reply, told: Told) -> bool:
        """Say text, reasoning and calls, each in a delta of its own kind."""
        delta = DeltaOut()
        calls: list[ToolCallOut] = []
        for event in told.events:
            match event:
                case Text():
                    delta.content = (delta.content or "") + event.text
                case Reasoning():
                    delta.reasoning_content = (delta.reasoning_content or "") + event.text
                case CallStarted():
                    ids = self._call_ids.setdefault(told.index, [])
                    ids.append(f"call_{secrets.token_hex(12)}")
                    function = FunctionOut("", event.name)
                    calls.append(ToolCallOut(function, event.index, ids[-1], "function"))
                case ArgumentsDelta():
                    if calls and calls[-1].index == event.index:
                        calls[-1].function.arguments += event.text
                    else:
                        calls.append(ToolCallOut(FunctionOut(event.text), event.index))
                case _:
                    pass
        delta.tool_calls = calls or None
        logprobs = self._note_logprobs(told)
        reply.choices = [ChatChunkChoice(told.index, delta, logprobs)]
        return logprobs is not None or delta != DeltaOut()

    def _note_logprobs(self, told: Told) -> ChatLogprobs | None:
        if not self._has_logprobs or not told.tokens:
            return None
        listed = [self._logprob(token) for token in told.tokens]
        self._logprobs.setdefault(told.index, []).extend(listed)
        return ChatLogprobs(listed)

    def _logprob(self, event: TokenEvent) -> TokenLogprob:
        raw = self._vocabulary.token_bytes(event.token)
        tops = [
            TopLogprob(other.decode(errors="replace"), value, list(other))
            for token, value in event.top_logprobs
            for other in (self._vocabulary.token_bytes(token),)
        ]
        return TokenLogprob(raw.decode(errors="replace"), event.logprob or 0.0, list(raw), tops)

    def close(self, reply: Reply, index: int, reason: FinishReason) -> None:
        """Say why the answer is over."""
        reply.choices = [ChatChunkChoice(index, DeltaOut(), None, reason)]

    def whole(self, reply: Reply, answers: list[Answered]) -> None:
        """Say all messages."""
        reply.choices = [self._choice(answer) for answer in answers]

    def _choice(self, answer: Answered) -> ChatChoice:
        told = answer.reader.message()
        calls = [
            ToolCallOut(FunctionOut(call.arguments, call.name), None, call_id, "function")
            for call, call_id in zip(told.calls, self.call_ids(answer.index), strict=False)
        ]
        text = told.text if told.text or not calls else None
        message = MessageOut("assistant", text, calls or None, told.reasoning)
        listed = self._logprobs.get(answer.index, [])
        logprobs = ChatLogprobs(listed) if self._has_logprobs else None
        return ChatChoice(answer.index, message, logprobs, answer.finish_reason)


@final
class TextShape:
    """Plain completions."""

    def __init__(self, vocabulary: Vocabulary, *, has_logprobs: bool) -> None:
        """Borrows the vocabulary."""
        self._vocabulary = vocabulary
        self._has_logprobs = has_logprobs
        self._logprobs: dict[int, TextLogprobs] = {}
        self._offsets: dict[int, int] = {}

    def open(self, reply: Reply, index: int) -> bool:
        """Nothing begins a completion."""
        return False

    def piece(self, reply: Reply, told: Told) -> bool:
        """Say the text."""
        text = "".join(event.text for event in told.events if isinstance(event, Text))
        logprobs = self._note_logprobs(told)
        reply.choices = [TextChoice(told.index, text, logprobs)]
        return bool(text) or logprobs is not None

    def _note_logprobs(self, told: Told) -> TextLogprobs | None:
        if not self._has_logprobs or not told.tokens:
            return None
        made = TextLogprobs([], [], [], [])
        offset = self._offsets.get(told.index, 0)
        for event in told.tokens:
            text = self._spell(event.token)
            made.tokens.append(text)
            made.token_logprobs.append(event.logprob or 0.0)
            made.top_logprobs.append({self._spell(t): value for t, value in event.top_logprobs})
            made.text_offset.append(offset)
            offset += len(text)
        self._offsets[told.index] = offset
        kept = self._logprobs.setdefault(told.index, TextLogprobs([], [], [], []))
        for name in made.__struct_fields__:
            getattr(kept, name).extend(getattr(made, name))
        return made

    def _spell(self, token: int) -> str:
        return self._vocabulary.token_bytes(token).decode(errors="replace")

    def close(self, reply: Reply, index: int, reason: FinishReason) -> None:
        """Say why the completion is over."""
        reply.choices = [TextChoice(index, "", None, reason)]

    def whole(self, reply: Reply, answers: list[Answered]) -> None:
        """Say all completions."""
        reply.choices = [
            TextChoice(
                a.index,
                a.reader.message().text,
                self._logprobs.get(a.index) if self._has_logprobs else None,
                a.finish_reason,
            )
            for a in answers
        ]
