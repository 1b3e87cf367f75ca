"""Refusals in the form that clients parse, each at once and with its reason."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping

import openai
import pytest
import trio

from kvlease.protocols.events import RpcRefused
from kvlease.services.serving.tenants import Tenant, salt_of
from tests.http.rig import CONFIG, ENDLESS, MODEL, open_server, user
from tests.rpc.rig import until

CHAT = "/v1/chat/completions"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, None),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**7}, "max_tokens"),
        ({"stop": [""]}, None),
        ({"stream_options": {}}, "stream_options"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "x"}}}]}, "tools"),
        ({"tools": [{"function": {"name": "f"}}, {"function": {"name": "f"}}]}, "tools"),
        ({"functions": [{}]}, "functions"),
    ],
)
async def test_a_request_that_cannot_be_served_names_the_field(
    change: Mapping[str, object], param: str | None
) -> None:
    async with open_server() as server, server.plain() as client:
        got = await client.post(CHAT, json={**ASK, **change})
        error = got.json()["error"]
        assert got.status_code == 400
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert error["message"]
        assert server.service.refused == {"bad_request": 1}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[]", "no request"),
        (b"{}", "no request: Object missing required field `model`"),
        (b"\xff", "no JSON"),
        (b"null", "no request"),
        (b"[" * 100_000, "no request"),
        (b'{"a":' * 100_000, "nests too deep"),
        (b'{"a":"\\ud800"}', "no JSON"),
    ],
)
async def test_a_body_that_is_no_request_is_refused(body: bytes, says: str) -> None:
    async with open_server() as server, server.plain() as client:
        for path in (CHAT, "/v1/completions"):
            got = await client.post(path, content=body)
            assert got.status_code == 400
            assert got.json()["error"]["type"] == "invalid_request_error"
            assert says in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [-1]}, None),
        ({"prompt": [[-1], [-2], [1]]}, None),
        ({"prompt": ""}, None),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"model": "gpt-4"}, "model"),
    ],
)
async def test_completions_that_cannot_be_served(
    change: Mapping[str, object], param: str | None
) -> None:
    async with open_server() as server, server.plain() as client:
        got = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a", **change})
        assert got.status_code == (404 if param == "model" else 400)
        assert got.json()["error"]["param"] == param


async def test_a_prompt_without_room_is_told_as_clients_know_it() -> None:
    async with open_server() as server, server.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=[user("x" * 20_000)])
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="x" * 20_000)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"


async def test_what_is_not_there_is_json_too() -> None:
    async with open_server() as server, server.plain() as client:
        assert (await client.get("/v1/nothing")).json()["error"]["message"] == "Not Found"
        got = await client.get(CHAT)
        assert got.status_code == 405
        assert "error" in got.json()


async def test_keys_are_asked_for_and_tenants_kept_apart() -> None:
    """A tenant's pages can neither be hit nor timed from another: hit counters prove it."""
    secrets = {"a": b"secret of tenant a", "b": b"secret of tenant b"}
    tenants = [Tenant(n, s, salt_of(s), is_admin=n == "a") for n, s in secrets.items()]
    async with open_server(tenants=tenants) as server:
        async with server.client("wrong") as client:
            with pytest.raises(openai.AuthenticationError, match="key"):
                await client.chat.completions.create(model=MODEL, messages=[user("x")])
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        cached = []
        for name in ("a", "b", "a"):
            async with server.client(secrets[name].decode()) as client:
                done = await client.chat.completions.create(
                    model=MODEL, messages=[user("the same words " * 30)]
                )
                assert done.usage is not None
                assert done.usage.prompt_tokens_details is not None
                cached.append(done.usage.prompt_tokens_details.cached_tokens)
        assert cached[:2] == [0, 0]
        assert cached[2]
        async with server.plain() as plain:
            statuses = [
                (
                    await plain.get("/metrics", headers={"authorization": f"Bearer {key}"})
                ).status_code
                for key in ("nobody", secrets["b"].decode(), secrets["a"].decode())
            ]
        assert statuses == [401, 403, 200]
        refused = [e for e in server.events if isinstance(e, RpcRefused)]
        assert {(e.code, e.door) for e in refused} == {("unauthorized", "http")}


async def test_too_many_answers_and_a_full_queue_are_told_to_come_again() -> None:
    async with open_server(ENDLESS, max_streams=1) as server, server.client() as client:
        server.model.gate = trio.Event()
        async with trio.open_nursery() as nursery:

            async def first() -> None:
                await client.chat.completions.create(
                    model=MODEL, messages=[user("x")], max_tokens=5
                )

            nursery.start_soon(first)
            await until(lambda: server.service.num_streams == 1)
            with pytest.raises(openai.RateLimitError, match="max_streams") as caught:
                await client.chat.completions.create(model=MODEL, messages=[user("x")], stream=True)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.type == "rate_limit_error"
            server.model.gate.set()
    from attrs import evolve

    config = evolve(CONFIG, max_sessions=1, max_queue=1)
    async with open_server(config=config) as server, server.client() as client:
        server.model.gate = trio.Event()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                await client.chat.completions.create(model=MODEL, messages=[user("x")])

            nursery.start_soon(ask)
            await until(lambda: server.engine.statistics().running == 1)
            nursery.start_soon(ask)
            await until(lambda: server.engine.statistics().waiting == 1)
            with pytest.raises(openai.RateLimitError, match="max_queue") as caught:
                await client.chat.completions.create(model=MODEL, messages=[user("x")])
            assert "retry-after" in caught.value.response.headers
            server.model.gate.set()


async def test_a_body_that_is_too_large_is_told_so_however_it_is_sent() -> None:
    async with open_server(max_frame_bytes=10_000) as server, server.plain() as client:
        large = json.dumps({**ASK, "user": "x" * 20_000_000}).encode()

        async def pieces() -> AsyncGenerator[bytes]:
            for start in range(0, len(large), 500_000):
                yield large[start : start + 500_000]

        for content in (large, pieces()):
            got = await client.post(CHAT, content=content)
            assert got.status_code == 413
            assert "max_frame_bytes" in got.json()["error"]["message"]
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(large)}\r\n\r\n"
        await stream.send_all(head.encode() + large)  # a client that hears only when it has spoken
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 413")
        await stream.aclose()


async def test_draining_refuses_and_finishes() -> None:
    """A server that ends loses no token of the answers under way."""
    async with open_server("a whole answer") as server, server.client() as client:
        server.model.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            said: list[str] = []

            async def stream() -> None:
                got = await client.chat.completions.create(
                    model=MODEL, messages=[user("x")], stream=True
                )
                said.extend([chunk.choices[0].delta.content or "" async for chunk in got])

            nursery.start_soon(stream)
            await until(lambda: server.service.num_streams == 1)
            nursery.start_soon(server.service.drain)
            await until(lambda: server.service.status == "draining")
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model=MODEL, messages=[user("x")])
            assert caught.value.status_code == 503
            assert caught.value.code == "draining"
            async with server.plain() as plain:
                assert (await plain.get("/health")).status_code == 503
            server.model.gate.set()
        assert "".join(said) == "a whole answer"
        with trio.fail_after(10):
            while True:
                try:
                    stream_ = await trio.open_tcp_stream("127.0.0.1", server.port)
                except OSError:
                    break
                await stream_.aclose()
                await trio.sleep(0.05)


async def test_an_answer_cut_by_the_drain_says_so() -> None:
    async with open_server(ENDLESS, drain_timeout_s=0.2) as server, server.client() as client:
        server.model.pause_s = 0.01
        got = await client.chat.completions.create(model=MODEL, messages=[user("x")], stream=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.service.drain)
            with pytest.raises(openai.APIError, match="before the answer was complete"):
                async for _ in got:
                    pass
