"""The handshake: each side proves that it knows the secret, and the secret never travels.

The server greets with a nonce; the client signs both nonces, and nothing else of it is read before
that is verified; the server signs them the other way round. This module knows no sockets.
"""

import hmac
import secrets

import msgspec

from kvlease.errors import Refused
from kvlease.protocols.rpc import (
    MAGIC,
    NONCE_BYTES,
    VERSION,
    Goodbye,
    Greeting,
    Hello,
    Welcome,
)
from kvlease.services.serving.tenants import Tenant, Tenants, sign

_CLIENT, _SERVER = b"kvlease-rpc client\0", b"kvlease-rpc server\0"

_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_greeting = msgspec.msgpack.Decoder(Greeting | Goodbye).decode
_decode_verdict = msgspec.msgpack.Decoder(Welcome | Goodbye).decode


def client_signs(server_nonce: bytes, client_nonce: bytes, version: int, tenant: str) -> bytes:
    """Return the bytes whose MAC a client gives."""
    return _CLIENT + server_nonce + client_nonce + bytes([version]) + tenant.encode()


def server_signs(server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the bytes whose MAC a server gives."""
    return _SERVER + client_nonce + server_nonce


def greeting(tenants: Tenants) -> Greeting:
    """Make a greeting with a fresh nonce."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Greeting(MAGIC, VERSION, VERSION, nonce, tenants.needs_secret)


def judge_hello(body: bytes, greeted: Greeting, tenants: Tenants) -> tuple[Tenant, bytes]:
    """Return who a client is, and the server's proof for it.

    Raises:
        Refused: this is no hello, of another version, or without the right proof.
    """
    try:
        hello = _decode_hello(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Refused("protocol", "the first frame is no Hello (docs/rpc.md)") from None
    if hello.version != VERSION:
        raise Refused(
            "version",
            f"this server speaks version {VERSION} of the protocol, not {hello.version}",
        )
    if len(hello.nonce) != NONCE_BYTES:
        raise Refused("protocol", f"a nonce has {NONCE_BYTES} bytes, not {len(hello.nonce)}")
    signed = client_signs(greeted.nonce, hello.nonce, hello.version, hello.tenant)
    tenant = tenants.by_mac(hello.tenant, signed, hello.mac)
    if tenant is None:
        raise Refused("unauthorized", "the tenant's name or its secret is wrong")
    return tenant, sign(tenant.secret, server_signs(greeted.nonce, hello.nonce))


def answer_greeting(body: bytes, tenant: str, secret: bytes) -> tuple[Greeting, Hello]:
    """Answer a server's greeting with a proof of the secret.

    Raises:
        Refused: it lets nobody in, is no server of ours, speaks no version that we do, or wants a
            secret.
    """
    try:
        greeted = _decode_greeting(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        greeted = None
    if isinstance(greeted, Goodbye):
        raise Refused(greeted.code, greeted.message, greeted.retry_after_s)
    if greeted is None or greeted.magic != MAGIC:
        raise Refused("protocol", "no kvlease server answers at this address")
    if not greeted.first_version <= VERSION <= greeted.last_version:
        raise Refused(
            "version",
            f"the server speaks versions {greeted.first_version} to {greeted.last_version} of the"
            f" protocol, and this client version {VERSION}",
        )
    if greeted.needs_secret and not secret:
        raise Refused("unauthorized", "the server wants a secret; give it with secret=")
    nonce = secrets.token_bytes(NONCE_BYTES)
    signed = client_signs(greeted.nonce, nonce, VERSION, tenant)
    return greeted, Hello(VERSION, tenant, nonce, sign(secret, signed) if secret else b"")


def judge_verdict(body: bytes, greeted: Greeting, hello: Hello, secret: bytes) -> Welcome:
    """Return a server's welcome, once it has proven to know the secret too.

    Raises:
        Refused: it turned the client away, or is not the server that it says.
    """
    try:
        verdict = _decode_verdict(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Refused("protocol", "the server's answer cannot be read") from None
    if isinstance(verdict, Goodbye):
        raise Refused(verdict.code, verdict.message, verdict.retry_after_s)
    if secret:
        expected = sign(secret, server_signs(greeted.nonce, hello.nonce))
        if not hmac.compare_digest(expected, verdict.mac):
            raise Refused("unauthorized", "the server does not know the secret; it is not ours")
    return verdict
