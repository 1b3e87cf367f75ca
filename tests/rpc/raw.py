"""A client made of nothing but a socket and docs/rpc.md: MessagePack by hand, HMAC by the library.

It imports nothing of kvlease, so that what it gets to work is what another language can.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Any

import trio

Value = Any
"""What MessagePack can hold; the tests say what they expect of it."""


def pack(value: Value) -> bytes:
    """Encode the few types that the protocol uses."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        if 0 <= value < 128:
            return bytes([value])
        return (
            b"\xcf" + struct.pack(">Q", value) if value >= 0 else b"\xd3" + struct.pack(">q", value)
        )
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode()
        return b"\xdb" + struct.pack(">I", len(data)) + data
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, (list, tuple)):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(pack, value))
    if isinstance(value, dict):
        items = b"".join(pack(key) + pack(item) for key, item in value.items())
        return b"\xdf" + struct.pack(">I", len(value)) + items
    raise TypeError(type(value))


class Reader:
    """Decodes MessagePack."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.data), "cut off"
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Value:
        return struct.unpack(">" + form, self.take(struct.calcsize(">" + form)))[0]

    def value(self) -> Value:
        head = self.take(1)[0]
        if head < 0x80:
            return head
        if head >= 0xE0:
            return head - 256
        if head < 0x90:
            return {self.value(): self.value() for _ in range(head & 15)}
        if head < 0xA0:
            return [self.value() for _ in range(head & 15)]
        if head < 0xC0:
            return self.take(head & 31).decode()
        simple = {0xC0: None, 0xC2: False, 0xC3: True}
        if head in simple:
            return simple[head]
        if head in (0xC4, 0xC5, 0xC6):
            return self.take(self.number({0xC4: "B", 0xC5: "H", 0xC6: "I"}[head]))
        if head in (0xD9, 0xDA, 0xDB):
            return self.take(self.number({0xD9: "B", 0xDA: "H", 0xDB: "I"}[head])).decode()
        if head in (0xDC, 0xDD):
            return [self.value() for _ in range(self.number("H" if head == 0xDC else "I"))]
        if head in (0xDE, 0xDF):
            count = self.number("H" if head == 0xDE else "I")
            return {self.value(): self.value() for _ in range(count)}
        forms = {0xCA: "f", 0xCB: "d", 0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q"}
        forms |= {0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
        return self.number(forms[head])


def unpack(data: bytes) -> Value:
    """Decode one value, which has to be all there is."""
    reader = Reader(data)
    value = reader.value()
    assert reader.at == len(data), "bytes behind the value"
    return value


def frame(value: Value) -> bytes:
    """Put the length in front."""
    body = pack(value)
    return struct.pack(">I", len(body)) + body


class Raw:
    """A socket, and frames on it."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.buffer = bytearray()

    async def send(self, value: Value) -> None:
        await self.stream.send_all(frame(value))

    async def receive(self) -> Value:
        """Return the next frame's value; None when the server has closed."""
        while len(self.buffer) < 4 or len(self.buffer) < 4 + int.from_bytes(self.buffer[:4], "big"):
            chunk = await self.stream.receive_some(65536)
            if not chunk:
                assert not self.buffer, "the server closed inside a frame"
                return None
            self.buffer += chunk
        length = int.from_bytes(self.buffer[:4], "big")
        body = bytes(self.buffer[4 : 4 + length])
        del self.buffer[: 4 + length]
        return unpack(body)

    async def receive_of(self, *numbers: int) -> Value:
        """Return the next message with one of these numbers, dropping others."""
        while True:
            message = await self.receive()
            if message is None or message[0] in numbers:
                return message

    async def shake(self, secret: bytes = b"", tenant: str = "", version: int = 1) -> Value:
        """Do the handshake; returns the server's verdict."""
        greeting = await self.receive()
        number, magic, first, last, nonce, needs_secret = greeting
        assert (number, magic, len(nonce)) == (0, "kvlease-rpc", 32)
        assert first <= 1 <= last
        assert needs_secret is bool(secret) or not secret or not needs_secret
        mine = secrets.token_bytes(32)
        signed = b"kvlease-rpc client\0" + nonce + mine + bytes([version]) + tenant.encode()
        mac = hmac.digest(secret, signed, "sha256") if secret else b""
        await self.send([1, version, tenant, mine, mac])
        verdict = await self.receive()
        if verdict is not None and verdict[0] == 2 and secret:
            expected = hmac.digest(secret, b"kvlease-rpc server\0" + mine + nonce, "sha256")
            assert verdict[1] == expected, "the server does not know the secret"
        return verdict
