"""TLS on a TCP listener: the same calls, a verified server, and nobody in the clear."""

import ssl
import subprocess
from pathlib import Path

import msgspec
import pytest
import trio

import kvlease
from kvlease.errors import ConnectionLost, Refused
from kvlease.protocols.config import SamplingParams
from kvlease.runtime.engine import open_engine
from kvlease.runtime.event_log import EventLog
from kvlease.services.rpc.address import TcpAddress
from kvlease.services.rpc.door import open_door
from kvlease.services.serving.config import ServeConfig
from kvlease.services.serving.limits import Limits
from kvlease.services.serving.plan import make_plan
from kvlease.services.serving.service import Service
from kvlease.services.serving.tenants import Tenant, Tenants
from tests.rpc.raw import Raw
from tests.rpc.rig import CONFIG, SECRET, open_server, prompt_of, until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Make a certificate of our own for localhost; returns its file and its key's."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"openssl cannot make a certificate here: {error}")
    return str(cert), str(key)


async def test_calls_over_tls(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    config = ServeConfig(listen=("tcp://127.0.0.1:0",), tls_cert=cert, tls_key=key)
    tls = make_plan(config).tls
    log = EventLog(level="off")
    async with open_engine(None, CONFIG, log=log) as engine:
        tenants = Tenants([Tenant(secret=SECRET, is_admin=True)])
        limits = msgspec.convert({"handshake_timeout_s": 3.0}, Limits)
        service = Service(engine, tenants, limits, log)
        async with open_door(service, [TcpAddress("localhost", 0)], tls) as door:
            port = int(door.addresses[0].rpartition(":")[2])
            address = f"tcp://localhost:{port}"
            trusting = ssl.create_default_context(cafile=cert)
            params = SamplingParams(max_tokens=300, ignore_eos=True)
            async with kvlease.connect(address, secret=SECRET, tls=trusting) as client:
                async with client.generate(prompt_of(1), params) as answer:
                    assert len((await answer.drain()).tokens) == 300
                assert (await client.statistics()).connections == 1
            stranger = ssl.create_default_context()
            with trio.fail_after(5), pytest.raises(Refused, match="verify failed"):
                async with kvlease.connect(address, secret=SECRET, tls=stranger):
                    pass
            with (
                trio.fail_after(10),
                pytest.raises(ConnectionLost, match="no server was"),
            ):
                async with kvlease.connect(address, secret=SECRET, connect_timeout_s=0.5):
                    pass
            with trio.fail_after(10):
                assert (await service.drain()).is_whole


async def test_a_server_that_speaks_no_tls_is_not_tried_again(certificate: tuple[str, str]) -> None:
    trusting = ssl.create_default_context(cafile=certificate[0])
    async with open_server() as server:
        with trio.fail_after(5), pytest.raises(Refused, match="handshake"):
            async with kvlease.connect(server.address, tls=trusting):
                pass


async def test_half_a_handshake_ends_within_its_limit_and_nobody_waits_for_a_farewell(
    certificate: tuple[str, str],
) -> None:
    """Silence, half a hello, a whole one, noise; and a peer that closes without close_notify."""
    tls = make_plan(ServeConfig(tls_cert=certificate[0], tls_key=certificate[1])).tls
    trusting = ssl.create_default_context(cafile=certificate[0])
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        trusting.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    hello = out.read()
    async with open_server(tls=tls, handshake_timeout_s=0.3) as server:
        for sent in (b"", hello[:40], hello, b"\x16\x03\x01\xff\xff" + b"x" * 100, b"GET /"):
            raw = await server.raw()
            await raw.stream.send_all(sent)
            with trio.fail_after(5):
                while await raw.stream.receive_some():
                    pass
        plain = await trio.open_tcp_stream("127.0.0.1", server.port)
        secured = trio.SSLStream(plain, trusting, server_hostname="localhost")
        await Raw(secured).shake()
        await until(lambda: server.service.clients)
        await plain.aclose()
        await until(lambda: not server.service.clients)


def test_a_certificate_and_a_key_that_do_not_fit_are_refused(
    certificate: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "key.pem").write_text("no key")
    config = ServeConfig(tls_cert=certificate[0], tls_key=str(tmp_path / "key.pem"))
    with pytest.raises(kvlease.BadInput, match="cannot load tls_cert"):
        make_plan(config)
