"""Calls end to end: what a client gets over a connection is what the engine gives."""

import ast
import re

import pytest
import trio

import kvlease
from kvlease.errors import ConnectionLost, DeadlineExceeded, Refused, UsageError
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import RpcCall, RpcClose, RpcOpen
from kvlease.services.serving.tenants import Tenant
from tests.rpc.rig import (
    SECRET,
    Server,
    assert_nothing_left,
    config_of,
    open_server,
    prompt_of,
    until,
)
from tests.tidy.rules import ROOT

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


async def test_an_answer_is_the_engines_own() -> None:
    """Same tokens, same usage, same end, whichever door."""
    prompt = prompt_of(1)
    async with open_server() as server, kvlease.connect(server.address) as client:
        async with server.engine.generate(prompt, LONG) as stream:
            local = await stream.drain()
        async with client.generate(prompt, LONG) as answer:
            tokens = [token async for token in answer]
        assert [token.token for token in tokens] == list(local.tokens)
        assert [token.index for token in tokens] == list(range(400))
        result = answer.result
        assert result.tokens == local.tokens
        assert result.finish_reason == "length"
        assert result.usage.prompt == 100
        assert result.usage.hit_device == 64
        assert result.ttft_s is not None


async def test_many_streams_share_one_connection() -> None:
    async with open_server() as server, kvlease.connect(server.address) as client:
        got: dict[int, tuple[int, ...]] = {}

        async def one(number: int) -> None:
            async with client.generate(prompt_of(number), LONG, window=100) as answer:
                got[number] = (await answer.drain()).tokens

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for number in range(60):
                    nursery.start_soon(one, number)
        assert client.num_connections == 1
        for number in (0, 59):
            async with server.engine.generate(prompt_of(number), LONG) as stream:
                assert (await stream.drain()).tokens == got[number]


async def test_log_probabilities_come_with_their_tokens() -> None:
    """The embedded model's, since without arithmetic there are none."""
    params = SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True)
    config = config_of(compute="model", device_pages=64)
    async with open_server(config=config) as server, kvlease.connect(server.address) as client:
        async with client.generate(list(b"hello"), params) as answer:
            remote = [token async for token in answer]
        async with server.engine.generate(list(b"hello"), params) as stream:
            local = [event async for event in stream]
    assert [t.logprob for t in remote] == [e.logprob for e in local]
    assert [t.top_logprobs for t in remote] == [tuple(e.top_logprobs) for e in local]
    assert len(remote[0].top_logprobs) == 2


async def test_leaving_the_block_ends_the_answer_at_the_server() -> None:
    """Cancel: pages come back and the engine computes no further token for it."""
    config = config_of(compute="model", page_tokens=64, device_pages=64)
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    async with open_server(config=config) as server, kvlease.connect(server.address) as client:
        async with client.generate(list(b"hello"), params) as answer:
            async for token in answer:
                if token.index == 2:
                    break
        now = await _at_rest(server)
        output = now["output_tokens"]
        assert output < 100
        assert now["cancelled"] == 1
        await trio.sleep(0.05)
        assert (await client.statistics()).engine["output_tokens"] == output
    call = next(e for e in server.events if isinstance(e, RpcCall))
    assert (call.code, call.output_tokens) == ("cancelled", output)


async def _at_rest(server: Server) -> dict[str, float]:
    await until(lambda: not (server.service.num_streams or server.engine.statistics().running))
    return server.service.statistics(recount=True).engine


async def test_a_bad_prompt_is_refused_in_one_sentence_and_the_connection_stays() -> None:
    async with open_server() as server, kvlease.connect(server.address) as client:
        for prompt, text in (([], "empty"), ([-1], "vocabulary"), (b"abc", "int32")):
            with pytest.raises(Refused, match=text) as caught:
                async with client.generate(prompt, LONG) as answer:
                    await answer.drain()
            assert caught.value.code == "bad_request"
        assert (await client.health()).status == "serving"
        assert client.num_connections == 1


async def test_health_and_statistics_tell_what_is_there() -> None:
    async with open_server() as server, kvlease.connect(server.address) as client:
        async with client.generate(prompt_of(1), LONG) as answer:
            await answer.drain()
        await _at_rest(server)
        health, statistics = await client.health(), await client.statistics(recount=True)
        assert (health.status, health.model, health.streams) == ("serving", "null", 0)
        assert statistics.ledger_ok
        assert statistics.connections == 1
        assert statistics.engine["output_tokens"] == 400
        assert statistics.doors["rpc_generate"] == 1
        assert statistics.pools["device"].total == 256
        assert client.welcome.page_tokens == 64


async def test_a_flush_forgets_what_was_cached() -> None:
    async with open_server() as server, kvlease.connect(server.address) as client:
        usages = []
        for flushes in (False, False, True):
            if flushes:
                await client.flush()
            async with client.generate(prompt_of(1), LONG) as answer:
                usages.append((await answer.drain()).usage.hit_device)
        assert usages == [0, 64, 0]


async def test_a_deadline_that_the_client_sets_holds() -> None:
    config = config_of(compute="model", device_pages=64)
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    async with open_server(config=config) as server, kvlease.connect(server.address) as client:
        with trio.fail_after(10):
            async with client.generate([1, 2], params, timeout_s=0.1) as answer:
                with pytest.raises(Refused, match=r"its 0\.\d{1,3} s") as caught:
                    await answer.drain()
        assert caught.value.code == "deadline"
        assert server.service.refused["deadline"] == 1


async def test_a_deadline_holds_while_the_server_is_sought() -> None:
    async with open_server() as server, kvlease.connect(server.address) as client:
        link = await client.link()
        await server.service.drain()
        await until(lambda: link.lost)
        with trio.fail_after(5), pytest.raises(DeadlineExceeded, match="not reached within"):
            async with client.generate([1, 2], timeout_s=0.2):
                pass
        with pytest.raises(UsageError, match="seconds above 0"):
            async with client.generate([1, 2], timeout_s=-1):
                pass


async def test_a_lost_connection_ends_its_calls_and_the_next_call_makes_another() -> None:
    """A generation is never repeated silently; a question that does no harm is."""
    config = config_of(compute="model")
    async with open_server(config=config) as server, kvlease.connect(server.address) as client:
        link = await client.link()
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        async with client.generate([1, 2, 3], params) as answer:
            assert (await answer.__anext__()).index == 0
            await trio.aclose_forcefully(link._stream)
            with pytest.raises(ConnectionLost, match="not repeated"):
                await answer.drain()
        assert answer.tokens
        await until(lambda: not server.service.num_streams)
        assert (await client.health()).status == "serving"
        assert client.num_connections == 2
        assert server.engine.statistics().counters.requests == 1


async def test_the_access_log_has_every_client_and_every_call() -> None:
    async with open_server() as server:
        async with kvlease.connect(server.address) as client:
            async with client.generate(prompt_of(1), LONG) as answer:
                await answer.drain()
            await client.health()
        await assert_nothing_left(server.engine, server.service)
        opened = [e for e in server.events if isinstance(e, RpcOpen)]
        calls = [e for e in server.events if isinstance(e, RpcCall)]
        closed = [e for e in server.events if isinstance(e, RpcClose)]
    assert [e.door for e in opened] == ["rpc"]
    assert [(e.method, e.code, e.output_tokens) for e in calls] == [
        ("generate", "ok", 400),
        ("health", "ok", 0),
    ]
    assert calls[0].request == 1
    assert [(e.client, e.calls) for e in closed] == [(opened[0].client, 2)]
    assert closed[0].received_bytes > 400
    assert closed[0].sent_bytes > 1600


@pytest.mark.parametrize("name", ["README.md", "docs/serve.md"])
async def test_the_client_that_documents_show_runs(name: str) -> None:
    """Whoever copies it gets an answer: only the address is another one here."""
    text = (ROOT / name).read_text(encoding="utf-8")
    example = re.findall(r"```python\n(async with kvlease.connect.*?)```", text, re.DOTALL)[0]
    async with open_server(tenants=[Tenant(secret=SECRET)]) as server:
        here = re.sub(r"tcp://[\w.-]+:7077", server.address, example)
        here = re.sub(r", tls=ssl\.\w+\(\)", "", here)
        code = compile(here, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        names = {"kvlease": kvlease, "secret": SECRET, "prompt": [1, 2], "prompt_tokens": [1, 2]}
        await eval(code, names)
        assert server.engine.statistics().counters.output_tokens == 64


async def test_nobody_there_is_one_sentence() -> None:
    with pytest.raises(ConnectionLost, match=r"no server was reached at tcp://127\.0\.0\.1:9"):
        async with kvlease.connect("tcp://127.0.0.1:9", connect_timeout_s=0.1):
            pass
