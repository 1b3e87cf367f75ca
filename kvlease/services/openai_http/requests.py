"""What clients send, as structs; a request that does not fit names the place in the error.

Fields that change nothing here (``user``, ``store``) are not listed and pass unread. Fields that
would change the answer and cannot be honoured are listed, so that they can be refused.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

MAX_CHOICES = 16
"""Answers that one request may ask for."""
MAX_TOP_LOGPROBS = 20


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A part of a message; there are no others."""

    text: str


Content: TypeAlias = str | list[TextPart]


class SystemIn(msgspec.Struct, tag_field="role", tag="system"):
    """Instructions."""

    content: Content


class DeveloperIn(msgspec.Struct, tag_field="role", tag="developer"):
    """Instructions, by their newer name."""

    content: Content


class UserIn(msgspec.Struct, tag_field="role", tag="user"):
    """A question."""

    content: Content


class FunctionCallIn(msgspec.Struct):
    """Which tool was called, and with what."""

    name: str
    arguments: str


class ToolCallIn(msgspec.Struct):
    """A call of an earlier answer."""

    function: FunctionCallIn
    id: str = ""
    type: Literal["function"] = "function"


class AssistantIn(msgspec.Struct, tag_field="role", tag="assistant"):
    """An earlier answer."""

    content: Content | None = None
    tool_calls: list[ToolCallIn] | None = None
    reasoning_content: str | None = None


class ToolIn(msgspec.Struct, tag_field="role", tag="tool"):
    """The result of a call."""

    content: Content
    tool_call_id: str = ""


MessageIn: TypeAlias = SystemIn | DeveloperIn | UserIn | AssistantIn | ToolIn


class FunctionIn(msgspec.Struct):
    """A tool."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None


class ToolDefinition(msgspec.Struct):
    """A tool that may be called."""

    function: FunctionIn
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    """The name of a tool."""

    name: str


class NamedToolChoice(msgspec.Struct):
    """That one certain tool has to be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class StreamOptions(msgspec.Struct):
    """What a stream holds beside the answer."""

    include_usage: bool = False


class ResponseFormat(msgspec.Struct):
    """The form that an answer should have."""

    type: str = "text"


class SampledRequest(msgspec.Struct, kw_only=True):
    """What both kinds of request have in common; the last three before OpenAI's are ours."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None


class ChatRequest(SampledRequest, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[MessageIn]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    functions: list[msgspec.Raw] | None = None


class CompletionRequest(SampledRequest, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
