"""Addresses of the RPC door: ``tcp://HOST:PORT`` and ``unix://PATH``."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

import trio
from attrs import frozen

from kvlease.errors import ConfigError


@frozen
class TcpAddress:
    """A host and a port; port 0 lets the system choose where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@frozen
class UnixAddress:
    """A socket's path; whoever may open the file can reach it."""

    path: str

    def __str__(self) -> str:
        return f"unix://{self.path}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return True


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """Read an address; raises ConfigError."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"address {text!r}: {error}") from None
    if parts.scheme == "unix":
        path = parts.netloc + parts.path
        if not path:
            raise ConfigError(f"address {text!r} has no path; write unix:///run/kvlease.sock")
        return UnixAddress(path)
    is_plain = not (parts.path or parts.query or parts.fragment or parts.username)
    if parts.scheme == "tcp" and parts.hostname and port is not None and is_plain:
        return TcpAddress(parts.hostname, port)
    raise ConfigError(f"address {text!r} is none; write tcp://HOST:PORT or unix://PATH")


def peer_of(stream: trio.SocketStream) -> str:
    """Return who is at the other end, as logs have it; who has gone again has no name."""
    if stream.socket.family == socket.AF_UNIX:
        return "unix"
    try:
        name = stream.socket.getpeername()
    except OSError:
        return "gone"
    return f"{name[0]}:{name[1]}"
