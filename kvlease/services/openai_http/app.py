"""The door as an ASGI application: routes, who may come in, and how errors are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, final

import msgspec
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from kvlease.errors import KVLeaseError, Refused
from kvlease.services.openai_http.channel import Channel, Gone
from kvlease.services.openai_http.context import DOOR, Context
from kvlease.services.openai_http.endpoints import Generation, Job, chat, completions
from kvlease.services.openai_http.errors import ParameterError, http_error
from kvlease.services.openai_http.replies import ErrorBody, ErrorReply, ModelCard, ModelList
from kvlease.services.serving.refusals import refusal_of
from kvlease.services.serving.service import Client

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from kvlease.services.serving.tenants import Tenant

THREAD_BYTES = 16_384
"""Larger bodies are understood in a thread: tokenising them would hold up everybody's tokens."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Understand: TypeAlias = Callable[[Context, bytes, bytes], Job]


@final
class Generating:
    """An ASGI endpoint for requests with a body that the engine answers."""

    def __init__(self, context: Context, understand: Understand) -> None:
        """Borrows the context."""
        self._context = context
        self._understand = understand

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Checkpoints: always."""
        context, channel = self._context, Channel(scope, receive, send)
        tenant: Tenant | None = None
        try:
            tenant = context.tenant_of(channel)
            with context.entered(channel, tenant) as client:
                await self._serve(client, channel)
        except KVLeaseError as error:
            await self._turn_away(channel, error, tenant)

    async def _turn_away(
        self,
        channel: Channel,
        error: KVLeaseError,
        tenant: Tenant | None,
        client: Client | None = None,
    ) -> None:
        """Refuse what did not become a call."""
        refusal = refusal_of(error)
        self._context.service.refuse(DOOR, channel.peer, refusal, client=client, tenant=tenant)
        await channel.fail(http_error(error))

    async def _serve(self, client: Client, channel: Channel) -> None:
        context, limits = self._context, self._context.service.limits
        try:
            body = await channel.body(limits.max_frame_bytes, limits.frame_timeout_s)
            arguments = context, client.tenant.salt, body
            if len(body) < THREAD_BYTES:
                job = self._understand(*arguments)
            else:
                job = await trio.to_thread.run_sync(self._understand, *arguments)
        except Gone:
            return
        except KVLeaseError as error:
            await self._turn_away(channel, error, client.tenant, client)
            return
        try:
            await Generation(context, client, channel, job).run()
        except KVLeaseError as error:
            await channel.fail(http_error(error))


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


@final
class _Pages:
    """The endpoints without a body."""

    def __init__(self, context: Context, metrics: Callable[[], bytes]) -> None:
        self._context = context
        self._metrics = metrics

    def _channel(self, request: Request) -> Channel:
        return Channel(request.scope, request.receive, request._send)

    def _told(self, error: KVLeaseError) -> Response:
        told = http_error(error)
        headers = {name.decode(): value.decode() for name, value in told.headers}
        return _json(told.body, told.status, headers)

    def _card(self) -> ModelCard:
        return ModelCard(self._context.model, self._context.started)

    async def models(self, request: Request) -> Response:
        try:
            self._context.tenant_of(self._channel(request))
        except KVLeaseError as error:
            return self._told(error)
        return _json(ModelList([self._card()]))

    async def model(self, request: Request) -> Response:
        try:
            self._context.tenant_of(self._channel(request))
        except KVLeaseError as error:
            return self._told(error)
        name = str(request.path_params["model"])
        if name != self._context.model:
            text = f"the model {name!r} is not served here; {self._context.model!r} is"
            return self._told(ParameterError(text, "model", "model_not_found"))
        return _json(self._card())

    async def health(self, _request: Request) -> Response:
        health = self._context.service.health()
        return _json(health, 200 if health.status == "serving" else 503)

    async def metrics(self, request: Request) -> Response:
        """Tell figures, which are of all tenants, to who may read them."""
        try:
            if not self._context.tenant_of(self._channel(request)).is_admin:
                raise Refused("forbidden", "/metrics is for an admin tenant only")
        except KVLeaseError as error:
            return self._told(error)
        return Response(self._metrics(), media_type=METRICS_TYPE)


async def _no_route(_request: Request, error: Exception) -> Response:
    status, detail = 500, "the server failed; its log says why"
    if isinstance(error, HTTPException):
        status, detail = error.status_code, error.detail
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return _json(ErrorReply(ErrorBody(detail, kind, None, None)), status)


def make_app(context: Context, metrics: Callable[[], bytes]) -> Starlette:
    """Put the endpoints together; ``metrics`` renders what Prometheus reads."""
    pages = _Pages(context, metrics)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", Generating(context, chat), methods=["POST"]),
            Route("/v1/completions", Generating(context, completions), methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{model:path}", pages.model),
            Route("/health", pages.health),
            Route("/metrics", pages.metrics),
        ],
        exception_handlers={HTTPException: _no_route, Exception: _no_route},
    )
