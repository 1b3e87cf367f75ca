"""The door over TLS, in both versions of HTTP that it then speaks."""

from __future__ import annotations

import ssl

import httpx
import pytest
import trio

from kvlease.services.openai_http.server import Certificate
from tests.http.rig import ENDLESS, MODEL, open_server
from tests.rpc.rig import until
from tests.rpc.test_tls import certificate as certificate

ASK = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}


@pytest.mark.parametrize("is_http2", [False, True])
async def test_streams_and_their_cancellation(certificate: tuple[str, str], is_http2: bool) -> None:
    trusting = ssl.create_default_context(cafile=certificate[0])
    async with open_server("Hello", ENDLESS, certificate=Certificate(*certificate)) as server:
        url = f"https://localhost:{server.port}"
        async with httpx.AsyncClient(http2=is_http2, verify=trusting, base_url=url) as client:
            whole = await client.post("/v1/chat/completions", json=ASK)
            assert whole.http_version == ("HTTP/2" if is_http2 else "HTTP/1.1")
            assert whole.text.count("data: ") > 3
            server.model.pause_s = 0.005
            async with client.stream("POST", "/v1/chat/completions", json=ASK) as answer:
                async for _ in answer.aiter_bytes():
                    break
        # This client resets no stream of HTTP/2, but it has closed its connection.
        await until(lambda: server.service.num_streams == 0)
        drawn = server.model.num_drawn
        await trio.sleep(0.05)
        assert server.model.num_drawn == drawn, "no token is computed for nobody"


async def test_nobody_is_served_in_the_clear(certificate: tuple[str, str]) -> None:
    proof = Certificate(*certificate)
    async with open_server(certificate=proof, handshake_timeout_s=0.3) as server:
        async with server.plain() as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/health")
        silent = await trio.open_tcp_stream("127.0.0.1", server.port)
        with trio.fail_after(5):
            async for _ in silent:
                pass
        await silent.aclose()
