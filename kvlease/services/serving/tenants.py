"""Who may call: tenants, their secrets, and the salt that keeps their pages apart (R10).

Secrets are compared in constant time, by a keyed hash, and never kept in anything that is printed.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import final

from attrs import field, frozen

from kvlease.errors import ConfigError

MIN_SECRET_BYTES = 16
"""Shorter secrets are refused: they could be tried out."""


@frozen
class Tenant:
    """One tenant.

    Attributes:
        name: what clients give and logs show; the only tenant of an open server has none.
        secret: what its clients prove to know; empty where nothing is asked.
        salt: its part of the cache identity.
        is_admin: whether it may flush, drain and read everybody's statistics.
        max_streams: its bound over all of its clients; None for the server's.
        device_pages, host_pages: quotas of cached pages by tier; None for no bound of its own.
    """

    name: str = ""
    secret: bytes = field(default=b"", repr=False)
    salt: bytes = field(default=b"", repr=False)
    is_admin: bool = False
    max_streams: int | None = None
    device_pages: int | None = None
    host_pages: int | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse what cannot work, naming the tenant."""
        who = f"tenant {self.name[:80]!r}" if self.name else "the server"
        if len(self.name) > 64 or not self.name.isprintable():
            raise ConfigError(f"{who}: a name is at most 64 printable characters")
        if self.secret and len(self.secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"{who}: the secret has {len(self.secret)} bytes; give {MIN_SECRET_BYTES} or more"
            )
        if self.max_streams is not None and self.max_streams < 1:
            raise ConfigError(f"{who}: max_streams is {self.max_streams}; give 1 or more")
        for name in ("device_pages", "host_pages"):
            pages: int | None = getattr(self, name)
            if pages is not None and pages < 0:
                raise ConfigError(f"{who}: {name} is {pages}; give 0 or more")


def salt_of(secret: bytes) -> bytes:
    """Derive a tenant's salt from its secret, without which nobody can guess the key of a page."""
    return hashlib.blake2b(secret, digest_size=32, person=b"kvlease salt").digest()


@final
class Tenants:
    """All tenants of one server. Without any, whoever reaches it is let in as its one user."""

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        """Take the tenants; raises ConfigError for two of one name, secret or salt."""
        listed = list(tenants) or [Tenant(is_admin=True)]
        self.by_name = {tenant.name: tenant for tenant in listed}
        self._index_key = secrets.token_bytes(32)
        self._by_secret = {self._index(t.secret): t for t in listed if t.secret}
        self._decoy = secrets.token_bytes(32)
        self.needs_secret = any(tenant.secret for tenant in listed)
        if self.needs_secret and len(self._by_secret) != len(listed):
            raise ConfigError("every tenant needs a secret, and each one of its own")
        if len(self.by_name) != len(listed):
            raise ConfigError("two tenants have the same name")
        if len({tenant.salt for tenant in listed}) != len(listed):
            raise ConfigError("two tenants have the same salt; they would share pages")

    def _index(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, digest_size=32, key=self._index_key).digest()

    def by_secret(self, secret: bytes) -> Tenant | None:
        """Find who a secret belongs to; the time it takes tells nothing about other secrets."""
        if not self.needs_secret:
            return next(iter(self.by_name.values()))
        return self._by_secret.get(self._index(secret))

    def by_mac(self, name: str, signed: bytes, mac: bytes) -> Tenant | None:
        """Find a tenant by name if ``mac`` is what its secret makes of ``signed``.

        A name that nobody has takes as long as a wrong secret.
        """
        tenant = self.by_name.get(name)
        if not self.needs_secret:
            return tenant
        expected = sign(self._decoy if tenant is None else tenant.secret, signed)
        return tenant if hmac.compare_digest(expected, mac) else None


def sign(secret: bytes, message: bytes) -> bytes:
    """Return the HMAC-SHA256 of a message, 32 bytes."""
    return hmac.digest(secret, message, "sha256")
