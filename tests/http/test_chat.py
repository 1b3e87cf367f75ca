"""The real `openai` client against a served engine: chat, streams, usage, several answers."""

from __future__ import annotations

import openai
import pytest
import trio

from kvlease.protocols.config import EngineConfig
from tests.http.rig import ENDLESS, MODEL, open_server, user


async def test_an_answer_and_its_usage() -> None:
    async with open_server("Hello, wörld 🙂") as server, server.client() as client:
        done = await client.chat.completions.create(model=MODEL, messages=[user("Hi")])
        (choice,) = done.choices
        assert choice.message.content == "Hello, wörld 🙂"
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "stop"
        assert done.usage is not None
        assert done.usage.completion_tokens == len("Hello, wörld 🙂".encode()) + 1
        assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
        assert done.model == MODEL


async def test_a_stream_says_the_same_piece_by_piece() -> None:
    async with open_server("Hello, wörld 🙂") as server, server.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[user("Hi")],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        said = [
            c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content
        ]
        assert "".join(said) == "Hello, wörld 🙂"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 19
        assert not chunks[-1].choices
        assert len({chunk.id for chunk in chunks}) == 1


async def test_the_sync_client_works_too() -> None:
    async with open_server("one", "two") as server:

        def ask() -> list[str | None]:
            with openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
                done = client.chat.completions.create(model=MODEL, messages=[user("Hi")])
                streamed = client.chat.completions.create(
                    model=MODEL, messages=[user("Hi")], stream=True
                )
                pieces = [c.choices[0].delta.content or "" for c in streamed if c.choices]
                return [done.choices[0].message.content, "".join(pieces)]

        assert await trio.to_thread.run_sync(ask) == ["one", "two"]


async def test_the_next_turn_finds_its_conversation_cached() -> None:
    """Multi-turn sessions live from this: only what is new is computed."""
    long = "word " * 60
    async with open_server(long, "fine") as server, server.client() as client:
        messages = [user(long)]
        first = await client.chat.completions.create(model=MODEL, messages=messages)
        told = first.choices[0].message.content
        assert told == long
        second = await client.chat.completions.create(
            model=MODEL,
            messages=[*messages, {"role": "assistant", "content": told}, user("And?")],
        )
        assert first.usage is not None
        assert second.usage is not None
        assert first.usage.prompt_tokens_details is not None
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert second.usage.prompt_tokens_details is not None
        page = server.engine.model.schema.page_tokens
        whole = (first.usage.total_tokens - 1) // page * page
        assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= whole - page


async def test_several_answers_and_stop_strings() -> None:
    async with open_server("a STOP b", "c STOP d", "e") as server, server.client() as client:
        done = await client.chat.completions.create(
            model=MODEL, messages=[user("Hi")], n=2, stop=["STOP", "x"], seed=7
        )
        assert [c.index for c in done.choices] == [0, 1]
        assert sorted(str(c.message.content) for c in done.choices) == ["a ", "c "]
        assert {c.finish_reason for c in done.choices} == {"stop"}
        stream = await client.chat.completions.create(
            model=MODEL, messages=[user("Hi")], n=2, stream=True
        )
        said = {0: "", 1: ""}
        async for chunk in stream:
            said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert sorted(said.values()) == ["e", "ok"]


async def test_limits_end_an_answer() -> None:
    async with open_server(ENDLESS, ENDLESS) as server, server.client() as client:
        for name in ("max_tokens", "max_completion_tokens"):
            done = await client.chat.completions.create(
                model=MODEL, messages=[user("Hi")], extra_body={name: 8}
            )
            assert done.choices[0].message.content == "tick tic"
            assert done.choices[0].finish_reason == "length"
            assert done.usage is not None
            assert done.usage.completion_tokens == 8


async def test_log_probabilities() -> None:
    async with open_server("é", "é", "ab") as server, server.client() as client:
        done = await client.chat.completions.create(
            model=MODEL, messages=[user("Hi")], logprobs=True, top_logprobs=2
        )
        listed = done.choices[0].logprobs
        assert listed is not None
        assert listed.content is not None
        assert [entry.bytes for entry in listed.content] == [[0xC3], [0xA9], []]
        assert listed.content[0].logprob == -0.5
        assert [top.token for top in listed.content[0].top_logprobs] == ["\ufffd", "A"]
        stream = await client.chat.completions.create(
            model=MODEL, messages=[user("Hi")], logprobs=True, stream=True
        )
        pieces = [c.choices[0].logprobs async for c in stream if c.choices]
        assert sum(len(p.content or []) for p in pieces if p is not None) == 3
        text = await client.completions.create(model=MODEL, prompt="Hi", logprobs=1)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.tokens == ["a", "b", ""]
        assert text.choices[0].logprobs.text_offset == [0, 1, 2]


async def test_reasoning_is_apart() -> None:
    async with open_server("hmm</think>4", "hmm</think>4") as server, server.client() as client:
        done = await client.chat.completions.create(
            model=MODEL, messages=[user("2+2?")], reasoning_effort="high"
        )
        message = done.choices[0].message
        assert message.content == "4"
        assert message.model_extra == {"reasoning_content": "hmm"}
        stream = await client.chat.completions.create(
            model=MODEL, messages=[user("2+2?")], reasoning_effort="high", stream=True
        )
        deltas = [c.choices[0].delta async for c in stream]
        assert "".join((d.model_extra or {}).get("reasoning_content", "") for d in deltas) == "hmm"
        assert "".join(d.content or "" for d in deltas) == "4"


async def test_completions_of_text_and_tokens() -> None:
    async with open_server("one", "two", "three", ENDLESS) as server, server.client() as client:
        done = await client.completions.create(model=MODEL, prompt=["a", "b"])
        assert [c.index for c in done.choices] == [0, 1]
        assert sorted(c.text for c in done.choices) == ["one", "two"]
        done = await client.completions.create(model=MODEL, prompt=[72, 105])
        assert done.choices[0].text == "three"
        assert done.usage is not None
        assert done.usage.prompt_tokens == 2
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks) == "tick tick tick t"
        assert chunks[-1].choices[0].finish_reason == "length"


async def test_models_and_health() -> None:
    async with open_server() as server, server.client() as client, server.plain() as plain:
        listed = await client.models.list()
        assert [model.id for model in listed.data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-4")
        health = await plain.get("/health")
        assert health.status_code == 200
        assert health.json()["status"] == "serving"


async def test_the_embedded_model_is_served() -> None:
    """The whole of it with real arithmetic: seeds repeat an answer, temperature 0 too."""
    from kvlease.runtime.models import load

    config = EngineConfig(device_pages=64, host_pages=64)
    model = await trio.to_thread.run_sync(lambda: load(None, config).runner)
    async with open_server(model=model, config=config) as server, server.client() as client:
        name = server.context.model

        async def ask(**extra: float) -> str | None:
            done = await client.chat.completions.create(
                model=name, messages=[user("Hi")], max_tokens=12, extra_body=extra
            )
            return done.choices[0].message.content

        assert await ask(seed=5) == await ask(seed=5)
        assert await ask(temperature=0) == await ask(temperature=0, seed=9)
        assert len({await ask(seed=seed) for seed in range(4)}) > 1
