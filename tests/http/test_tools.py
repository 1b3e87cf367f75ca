"""Tool calls through the door: round trips, forced calls, and what becomes of a garbled one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from kvlease.protocols.events import RequestToolCallError, RpcCall
from kvlease.services.serving.tenants import Tenant, salt_of
from kvlease.services.tool_calls.markup import (
    BLOCK,
    BLOCK_END,
    INVOKE_END,
    OPEN,
    SEPARATOR,
    Call,
    write_block,
)
from tests.http.rig import MODEL, Server, open_server, user

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALLS = [Call("weather", '{"city": "Bonn", "days": 2}'), Call("weather", '{"city": "Ulm"}')]
GARBLED = SEPARATOR + write_block(CALLS).replace("invoke name", "invoke nme")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_round_trip(is_streamed: bool) -> None:
    """The model calls, the client answers, the model goes on: all through the real client."""
    scripts = ["Let me see." + SEPARATOR + write_block(CALLS), "Rain."]
    async with open_server(*scripts) as server, server.client() as client:
        messages: list[ChatCompletionMessageParam] = [user("Weather in Bonn and Ulm?")]
        calls: dict[int, list[str]] = {}
        text = ""
        if is_streamed:
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, tools=[WEATHER], stream=True
            )
            reasons = []
            async for chunk in stream:
                delta = chunk.choices[0].delta
                text += delta.content or ""
                reasons.append(chunk.choices[0].finish_reason)
                for piece in delta.tool_calls or ():
                    assert piece.function is not None
                    entry = calls.setdefault(
                        piece.index, [piece.id or "", piece.function.name or "", ""]
                    )
                    entry[2] += piece.function.arguments or ""
            assert reasons[-1] == "tool_calls"
        else:
            done = await client.chat.completions.create(
                model=MODEL, messages=messages, tools=[WEATHER]
            )
            text = done.choices[0].message.content or ""
            assert done.choices[0].finish_reason == "tool_calls"
            for place, call in enumerate(done.choices[0].message.tool_calls or ()):
                assert call.type == "function"
                calls[place] = [call.id, call.function.name, call.function.arguments]
        assert text == "Let me see."
        assert [(name, arguments) for _, name, arguments in calls.values()] == [
            (call.name, call.arguments) for call in CALLS
        ]
        assert len({call_id for call_id, _, _ in calls.values()}) == 2
        messages.append(
            {
                "role": "assistant",
                "content": text,
                "tool_calls": [
                    {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
                    for i, n, a in calls.values()
                ],
            }
        )
        for call_id, _, arguments in reversed(calls.values()):
            city = json.loads(arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": f"rain in {city}"})
        done = await client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
        assert done.choices[0].message.content == "Rain."
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        assert (done.usage.prompt_tokens_details.cached_tokens or 0) > 500, "the turn before it"


async def test_forced_calls() -> None:
    rest = write_block(CALLS[:1]).removeprefix(f'{OPEN}{BLOCK}>\n{OPEN}invoke name="')
    named = rest.removeprefix('weather">\n')
    async with open_server(rest, named, rest) as server, server.client() as client:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            done = await client.chat.completions.create(
                model=MODEL,
                messages=[user("Bonn?")],
                tools=[WEATHER],
                extra_body={"tool_choice": choice},
            )
            (call,) = done.choices[0].message.tool_calls or []
            assert call.type == "function"
            assert call.function.arguments == CALLS[0].arguments
            assert done.choices[0].message.content is None


async def test_one_call_only_if_the_client_says_so() -> None:
    async with open_server(SEPARATOR + write_block(CALLS)) as server, server.client() as client:
        done = await client.chat.completions.create(
            model=MODEL, messages=[user("?")], tools=[WEATHER], parallel_tool_calls=False
        )
        assert len(done.choices[0].message.tool_calls or ()) == 1
        assert done.choices[0].finish_reason == "tool_calls"


def told(server: Server) -> RequestToolCallError:
    (event,) = [e for e in server.events if isinstance(e, RequestToolCallError)]
    return event


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("script", "tools", "reason"),
    [
        (GARBLED, [WEATHER], "syntax"),
        (SEPARATOR + write_block(CALLS), None, "unknown_tool"),
        (SEPARATOR + write_block([Call("weather", '{"city": 3}')]), [WEATHER], "schema"),
        (SEPARATOR + write_block(CALLS)[:60], [WEATHER], "truncated"),
    ],
)
async def test_a_garbled_call_is_an_error_and_in_the_log(
    script: str, tools: list[ChatCompletionToolParam] | None, reason: str, is_streamed: bool
) -> None:
    """The first symptom of a corrupt cache must reach somebody: client, log and counter."""
    async with open_server("Hm." + script) as server, server.client() as client:
        with pytest.raises(openai.APIError, match="malformed") as caught:
            got = await client.chat.completions.create(
                model=MODEL, messages=[user("?")], tools=tools or openai.omit, stream=is_streamed
            )
            assert isinstance(got, openai.AsyncStream)
            async for chunk in got:
                assert "DSML" not in chunk.to_json()
        assert caught.value.code == f"malformed_tool_call_{reason}"
        if isinstance(caught.value, openai.APIStatusError):
            assert caught.value.status_code == 500
            assert caught.value.response.headers["x-should-retry"] == "false"
        else:
            assert is_streamed
        event = told(server)
        assert (event.reason, event.request) == (reason, 1)
        assert event.raw
        assert script.startswith(event.raw)
        assert server.service.statistics().tool_call_errors == {reason: 1}
        (call,) = [e for e in server.events if isinstance(e, RpcCall)]
        assert (call.code, call.method, call.request) == ("failed", "chat", 1)


async def test_the_next_turn_has_the_calls_as_the_model_wrote_them() -> None:
    """One JSON object is as good as parameters, and not the same tokens: the cache knows which.

    Another tenant's conversation, word for word the same, is written from its text.
    """
    arguments = json.dumps({"city": "Bonn", "days": 1, "more": "x" * 300})
    invoke = f'{OPEN}invoke name="weather">{arguments}{INVOKE_END}'
    script = f"{SEPARATOR}{OPEN}{BLOCK}>\n{invoke}{BLOCK_END}"
    secrets = {name: f"the secret of tenant {name}".encode() for name in "ab"}
    tenants = [Tenant(name, secret, salt_of(secret)) for name, secret in secrets.items()]
    async with open_server(script, tenants=tenants) as server:
        asked: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "messages": [user("Bonn?")]}
        usages: list[Any] = []
        for name in ("a", "a", "b"):
            async with server.client(secrets[name].decode()) as client:
                done = await client.chat.completions.create(**asked)
            usages.append(done.usage)
            if len(asked["messages"]) == 1:
                message = done.choices[0].message.model_dump(exclude_none=True)
                call_id = message["tool_calls"][0]["id"]
                result = {"role": "tool", "tool_call_id": call_id, "content": "rain"}
                asked["messages"] += [message, result]
        first, second, other = usages
        page = server.engine.model.schema.page_tokens
        assert second.prompt_tokens_details.cached_tokens >= first.total_tokens - 2 * page
        assert second.prompt_tokens > first.total_tokens
        assert other.prompt_tokens != second.prompt_tokens
        assert other.prompt_tokens_details.cached_tokens == 0
