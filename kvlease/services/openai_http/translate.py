"""Requests to what the engine and the chat encoder take; refuses what cannot be honoured."""

import secrets
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from attrs import frozen

from kvlease.errors import BadInput
from kvlease.protocols.config import SamplingParams
from kvlease.services.chat.encoder import ToolChoice
from kvlease.services.chat.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from kvlease.services.openai_http import requests
from kvlease.services.openai_http.errors import ParameterError
from kvlease.services.tool_calls.markup import Call
from kvlease.services.tool_calls.tools import NO_TOOLS, Toolbox, ToolSpec

MAX_BATCH_PROMPTS = 64
COMPLETION_TOKENS = 16
"""Tokens of a completion whose request names no number; OpenAI's own."""
T = TypeVar("T")
_NO_REASONING = frozenset(["none", "minimal"])


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a body; raises ParameterError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ParameterError.of_body(error) from error


@frozen
class Room:
    """How long prompt and answer may be together, in tokens."""

    positions: int
    pool_tokens: int

    def max_tokens(
        self, num_prompt: int, asked: int | None, field: str, default: int | None = None
    ) -> int:
        """Return the length of an answer; raises ParameterError if it has no room.

        ``field`` is the prompt's name in the request, for who has to shorten it.
        """
        most = min(self.positions, self.pool_tokens)
        room = most - num_prompt
        tokens = asked if asked is not None else min(default or room, room)
        if room < 1 or tokens > room:
            raise ParameterError(
                f"{num_prompt} prompt tokens and {max(tokens, 1)} of the answer are more than the"
                f" {most} that fit; shorten the prompt, or ask for fewer (max_tokens)",
                field if room < 1 else "max_tokens",
                "context_length_exceeded",
            )
        return tokens


def _text(content: requests.Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n\n".join(part.text for part in content)


def _message(message: requests.MessageIn) -> Message:
    match message:
        case requests.SystemIn() | requests.DeveloperIn():
            return SystemMessage(_text(message.content))
        case requests.UserIn():
            return UserMessage(_text(message.content))
        case requests.ToolIn():
            return ToolMessage(_text(message.content), message.tool_call_id)
        case requests.AssistantIn():
            calls = message.tool_calls or ()
            return AssistantMessage(
                _text(message.content),
                tuple(Call(call.function.name, call.function.arguments) for call in calls),
                tuple(call.id for call in calls),
                message.reasoning_content,
            )


def messages_of(request: requests.ChatRequest) -> list[Message]:
    """Return the conversation."""
    return [_message(message) for message in request.messages]


def tools_of(request: requests.ChatRequest) -> tuple[Sequence[ToolSpec], Toolbox]:
    """Return the tools that the prompt lists, and those that may be called."""
    listed = [
        ToolSpec(t.function.name, t.function.description, t.function.parameters)
        for t in request.tools or ()
    ]
    try:
        box = Toolbox(listed)
    except BadInput as error:
        raise ParameterError(str(error), "tools") from error
    return box.tools, NO_TOOLS if request.tool_choice == "none" else box


def choice_of(request: requests.ChatRequest, tools: Toolbox) -> ToolChoice | None:
    """Return the call that is forced, if one is."""
    chosen = request.tool_choice
    if chosen in (None, "none", "auto"):
        return None
    if not tools.tools:
        raise ParameterError("tool_choice asks for a call, and no tools are given", "tool_choice")
    if not isinstance(chosen, requests.NamedToolChoice):
        return ToolChoice()
    if chosen.function.name not in tools:
        raise ParameterError(
            f"tool_choice names {chosen.function.name!r}, which is none of the tools", "tool_choice"
        )
    return ToolChoice(chosen.function.name)


def is_thinking(request: requests.ChatRequest) -> bool:
    """Return whether the answer begins with reasoning: only if some effort is asked for."""
    effort = request.reasoning_effort
    return effort is not None and effort not in _NO_REASONING


def stops_of(request: requests.SampledRequest) -> list[str]:
    """Return the stop strings."""
    stop = request.stop
    return [stop] if isinstance(stop, str) else stop or []


def check_sampled(request: requests.SampledRequest, model: str) -> None:
    """Refuse what no model here can do, and models that are not here."""
    if request.model != model:
        raise ParameterError(
            f"the model {request.model!r} is not served here; {model!r} is",
            "model",
            "model_not_found",
        )
    for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
        if getattr(request, name):
            raise ParameterError(f"{name} is not supported; leave it out", name)
    if request.stream_options is not None and not request.stream:
        raise ParameterError("stream_options needs stream to be true", "stream_options")


def check_chat(request: requests.ChatRequest) -> None:
    """Refuse what chat cannot do."""
    form = request.response_format
    if form is not None and form.type != "text":
        raise ParameterError(
            f"response_format {form.type!r} is not supported; only 'text' is", "response_format"
        )
    if request.functions:
        raise ParameterError("functions are not supported; give tools", "functions")
    if request.top_logprobs is not None and not request.logprobs:
        raise ParameterError("top_logprobs needs logprobs to be true", "top_logprobs")


def check_completion(request: requests.CompletionRequest) -> None:
    """Refuse what completions cannot do."""
    for name in ("echo", "suffix"):
        if getattr(request, name):
            raise ParameterError(f"{name} is not supported; leave it out", name)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ParameterError("best_of is not supported; ask for n answers", "best_of")


def prompts_of(request: requests.CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a completion: texts, or tokens; one, or several."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    numbers = [item for item in prompt if isinstance(item, int)]
    if numbers and len(numbers) == len(prompt):
        return [numbers]
    others = [item for item in prompt if not isinstance(item, int)]
    if not others or len(others) != len(prompt):
        raise ParameterError("give a text, tokens, or a list of one of these", "prompt")
    if len(others) * (request.n or 1) > MAX_BATCH_PROMPTS:
        raise ParameterError(f"over {MAX_BATCH_PROMPTS} answers in one request", "prompt")
    return list(others)


def sampling_of(
    request: requests.SampledRequest, index: int, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Return how one answer is drawn: as asked, and OpenAI's defaults; each of n its own way."""
    seed = secrets.randbits(62) if request.seed is None else request.seed + index
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
        seed=seed % (1 << 63),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
    )
