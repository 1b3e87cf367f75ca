"""The key that names everything that changes a page's bytes (R10), and keyed page hashes.

One prefix tree exists per identity; a tenant's salt is part of it, so equal prompts of two tenants
share nothing, and page hashes are keyed with it, so that they cannot be guessed across tenants.
"""

import hashlib

import msgspec
from attrs import frozen


@frozen
class CacheIdentity:
    """What must be equal for two requests to share pages."""

    fingerprint: str
    schema_digest: str
    weights_version: int = 0
    adapter: str = ""
    tenant_salt: bytes = b""
    parallel_layout: str = "tp1"

    def root(self) -> bytes:
        """Return the 16-byte key of this identity's prefix tree."""
        facts = [
            self.fingerprint,
            self.schema_digest,
            self.weights_version,
            self.adapter,
            self.parallel_layout,
        ]
        salt = hashlib.blake2b(self.tenant_salt, digest_size=32).digest()
        return hashlib.blake2b(msgspec.json.encode(facts), digest_size=16, key=salt).digest()


def tenant_name(salt: bytes) -> str:
    """Return what the event log calls a tenant: a hash of the salt, which stands in no log."""
    return hashlib.blake2b(salt, digest_size=8, person=b"tenant").hexdigest()


def page_hash(parent: bytes, page_tokens: bytes) -> bytes:
    """Return the chained key of a page: 16 bytes from its parent's key and its own tokens.

    The first page's parent is `CacheIdentity.root`. Computed once a page, when a storage tier
    needs it.
    """
    return hashlib.blake2b(page_tokens, digest_size=16, key=parent).digest()
