"""What all requests of the door share: the service, the encoder, the clients that are there."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import final

from kvlease.errors import Refused
from kvlease.protocols.events import EventSink, RequestToolCallError
from kvlease.services.chat.encoder import ChatEncoder
from kvlease.services.openai_http.channel import Channel
from kvlease.services.openai_http.errors import MalformedCall, ParameterError
from kvlease.services.openai_http.replies import Reply
from kvlease.services.openai_http.shapes import new_reply
from kvlease.services.openai_http.translate import Room
from kvlease.services.serving.service import Client, Service
from kvlease.services.serving.tenants import Tenant
from kvlease.services.sessions import pack

DOOR = "http"
MAX_RAW = 16_384
"""Characters of a malformed call that the log keeps."""


@final
class Context:
    """One door's requests. Trio thread only.

    A client of this door is a tenant at an address, for as long as it has a request open.
    """

    def __init__(self, service: Service, encoder: ChatEncoder, log: EventSink) -> None:
        """Borrows all three."""
        self.service = service
        self.encoder = encoder
        self.started = int(time.time())
        self._log = log
        self._clients: dict[tuple[str, str], tuple[Client, int]] = {}
        engine = service.engine
        self.model = engine.model_name
        page_tokens = engine.model.schema.page_tokens
        self.room = Room(engine.model.max_positions, engine.config.device_pages * page_tokens)

    def new_reply(self, prefix: str, kind: str) -> Reply:
        """Return a reply without choices."""
        fingerprint = f"fp_{self.service.engine.model.fingerprint[:12]}"
        return new_reply(prefix, kind, int(time.time()), self.model, fingerprint)

    def packed(self, tokens: list[int]) -> bytes:
        """Return tokens that a client gave as the engine takes them; raises ParameterError."""
        try:
            return pack(tokens)
        except OverflowError as error:
            raise ParameterError("a token of the prompt is no 32-bit number", "prompt") from error

    def tenant_of(self, channel: Channel) -> Tenant:
        """Find who asks by the bearer key; raises Refused."""
        header = channel.header(b"authorization") or b""
        scheme, _, key = header.partition(b" ")
        tenants = self.service.tenants
        tenant = tenants.by_secret(key.strip()) if scheme.lower() == b"bearer" else None
        if tenant is None and not tenants.needs_secret:
            tenant = tenants.by_secret(b"")
        if tenant is None:
            raise Refused(
                "unauthorized",
                "the key is missing or wrong; send 'Authorization: Bearer KEY'",
            )
        return tenant

    @contextmanager
    def entered(self, channel: Channel, tenant: Tenant) -> Generator[Client]:
        """Be a client for one request; raises Refused."""
        key = (tenant.name, channel.peer)
        client, count = self._clients.get(key, (None, 0))
        if client is None:
            client = self.service.enter(DOOR, channel.peer, tenant)
        self._clients[key] = client, count + 1
        try:
            yield client
        finally:
            _, count = self._clients[key]
            if count > 1:
                self._clients[key] = client, count - 1
            else:
                del self._clients[key]
                self.service.leave(client, "done")

    def note_malformed(self, error: MalformedCall, request: int) -> None:
        """Count a malformed call and write it to the log, with what the model wrote."""
        found = error.error
        self.service.tool_call_errors[found.reason] += 1
        if self._log.normal:
            self._log.emit(
                RequestToolCallError(
                    request=request,
                    reason=found.reason,
                    message=found.message,
                    raw=found.raw[-MAX_RAW:],
                )
            )
