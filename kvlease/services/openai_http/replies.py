"""What clients are sent, as structs; names and shapes are OpenAI's."""

from typing import Literal, TypeAlias

import msgspec

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class TokenDetails(msgspec.Struct):
    """Prompt tokens that no step had to compute."""

    cached_tokens: int = 0


class UsageOut(msgspec.Struct):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class FunctionOut(msgspec.Struct, omit_defaults=True):
    """A call, or a piece of one."""

    arguments: str
    name: str | None = None


class ToolCallOut(msgspec.Struct, omit_defaults=True):
    """A call of the answer; without index where it is whole."""

    function: FunctionOut
    index: int | None = None
    id: str | None = None
    type: str | None = None


class TopLogprob(msgspec.Struct):
    """A token that might have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token that was drawn, and the likeliest others."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of an answer, or of a piece of one."""

    content: list[TokenLogprob]


class MessageOut(msgspec.Struct, omit_defaults=True):
    """A whole answer."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCallOut] | None = None
    reasoning_content: str | None = None


class DeltaOut(msgspec.Struct, omit_defaults=True):
    """A piece of an answer."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallOut] | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct):
    """One whole answer of a request."""

    index: int
    message: MessageOut
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(msgspec.Struct):
    """A piece of one answer of a request."""

    index: int
    delta: DeltaOut
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextLogprobs(msgspec.Struct):
    """Log-probabilities in the form of the older protocol."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    """A completion, or a piece of one."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


Choice: TypeAlias = ChatChoice | ChatChunkChoice | TextChoice


class Reply(msgspec.Struct, omit_defaults=True):
    """The body of an answer, or of one event of a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[TextChoice]
    usage: UsageOut | None = None


class ErrorBody(msgspec.Struct):
    """An error as clients parse it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    """The body of an error, or the event that ends a stream with one."""

    error: ErrorBody


class ModelCard(msgspec.Struct):
    """A model that is served."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "kvlease"


class ModelList(msgspec.Struct):
    """All models that are served."""

    data: list[ModelCard]
    object: str = "list"


def event(reply: Reply | ErrorReply) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(reply) + b"\n\n"


DONE = b"data: [DONE]\n\n"
"""The event that ends a stream in good order."""
