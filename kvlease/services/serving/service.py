"""The service: one engine as its doors see it. Who is there, what may be asked, and what was.

Every call of every door passes through here, so that limits, tenants, draining and the access log
are the same at all of them. It knows no protocol and no socket.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Literal, final

import trio
from attrs import asdict, define, frozen

from kvlease.errors import KVLeaseError, Refused
from kvlease.protocols.config import SamplingParams
from kvlease.protocols.events import Event, RpcCall, RpcClose, RpcDrain, RpcOpen, RpcRefused
from kvlease.protocols.rpc import Health, PoolCounts, ServerStatistics, TenantCounts
from kvlease.runtime.event_log import EventLog
from kvlease.runtime.request import Listener
from kvlease.services.serving.limits import Limits
from kvlease.services.serving.refusals import refusal_of
from kvlease.services.serving.tenants import Tenant, Tenants
from kvlease.version import __version__

if TYPE_CHECKING:
    from kvlease.runtime.engine import AnswerStream, Engine


@define(eq=False)
class Client:
    """Somebody who was let in: a connection, or whatever a door takes for one.

    ``num_streams`` and ``num_calls`` are the service's to count, bytes the door's.
    """

    id: int
    door: str
    peer: str
    tenant: Tenant
    num_streams: int = 0
    num_calls: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


@define
class Call:
    """One call while it runs, for the access log; a door may correct ``code``."""

    method: str
    prompt_tokens: int = 0
    request: int = 0
    output_tokens: int = 0
    code: str = "ok"
    why: str = ""


@frozen
class DrainReport:
    """How a drain ended: calls that were cut short, and whether all had finished by themselves."""

    cut: int

    @property
    def is_whole(self) -> bool:
        """Whether no answer was lost."""
        return self.cut == 0


@final
class Service:
    """One engine behind its doors.

    Ownership: borrows engine and log for its life. Trio thread only.
    """

    def __init__(self, engine: Engine, tenants: Tenants, limits: Limits, log: EventLog) -> None:
        """Serve from now on."""
        self.engine = engine
        self.tenants = tenants
        self.limits = limits
        self.status: Literal["serving", "draining"] = "serving"
        self.drain_asked = trio.Event()
        """Set once somebody has called `drain`."""
        self.cutting, self.drained = trio.Event(), trio.Event()
        """Set once nobody is waited for any more; and once no call is left after `drain`."""
        self.num_streams = 0
        self.clients: set[Client] = set()
        self.refused: Counter[str] = Counter()
        self.doors: Counter[str] = Counter()
        self.tool_call_errors: Counter[str] = Counter()
        """Answers whose tool calls were malformed, by reason."""
        self.incarnation = secrets.token_hex(8)
        self._log = log
        self._started_s = trio.current_time()
        self._last_client = self._last_call = 0
        self._calls: Counter[str] = Counter()
        self._tenant_refused: Counter[str] = Counter()
        self._tenant_streams: Counter[str] = Counter()
        self._open: set[trio.CancelScope] = set()
        self._idle = trio.Event()
        self._idle.set()
        self._cut = 0
        self._drain_lock = trio.Lock()
        self._drain_end_s = 0.0

    # -- clients -------------------------------------------------------------------------------

    def enter(self, door: str, peer: str, tenant: Tenant) -> Client:
        """Let a client in; raises Refused when there are too many, or when draining.

        The door passes what it raises to `refuse`, as it does for a client that it does not know.
        """
        if self.status == "draining":
            raise self._draining()
        if len(self.clients) >= self.limits.max_connections:
            raise Refused(
                "too_many",
                f"{len(self.clients)} clients are connected, as many as may (max_connections)",
                1.0,
            )
        self._last_client += 1
        client = Client(self._last_client, door, peer, tenant)
        self.clients.add(client)
        self.doors[f"{door}_clients"] += 1
        if self._log.normal:
            self._emit(RpcOpen(client=client.id, door=door, peer=peer, tenant=tenant.name))
        return client

    def leave(self, client: Client, reason: str) -> None:
        """Note that a client has gone; its calls have ended before."""
        self.clients.discard(client)
        if self._log.normal:
            self._emit(
                RpcClose(
                    client=client.id,
                    reason=reason,
                    calls=client.num_calls,
                    received_bytes=client.received_bytes,
                    sent_bytes=client.sent_bytes,
                )
            )

    def refuse(
        self,
        door: str,
        peer: str,
        error: Refused,
        *,
        client: Client | None = None,
        tenant: Tenant | None = None,
    ) -> Refused:
        """Count and log that somebody is turned away before a call began; returns the error."""
        who = client.tenant if client is not None else tenant
        self.refused[error.code] += 1
        name = "" if who is None else who.name
        self._tenant_refused[name] += 1
        if self._log.normal:
            number = 0 if client is None else client.id
            self._emit(
                RpcRefused(
                    door=door,
                    peer=peer,
                    code=error.code,
                    why=str(error),
                    client=number,
                    tenant=name,
                )
            )
        return error

    def refuse_client(self, client: Client, code: str, why: str) -> Refused:
        """Count and log that a client that was let in is sent away; returns the error."""
        return self.refuse(client.door, client.peer, Refused(code, why), client=client)

    def _emit(self, event: Event) -> None:
        event.actor = "doors"
        self._log.emit(event)

    def _draining(self) -> Refused:
        return Refused("draining", "the server is ending and takes no more requests", None)

    # -- calls ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(
        self,
        client: Client,
        prompt: bytes,
        params: SamplingParams,
        *,
        timeout_s: float | None = None,
        listener: Listener | None = None,
        method: str = "generate",
    ) -> AsyncGenerator[tuple[AnswerStream, Call]]:
        """Answer a prompt for a client; the block counts as one of its streams until it is left.

        Args:
            client: who asks; its tenant's salt keeps its pages apart.
            prompt: int32 bytes.
            params: how the answer is drawn.
            timeout_s: the client's own deadline.
            listener: as in `Engine.generate`.
            method: what the access log calls it.

        Checkpoints: as `Engine.generate`. Raises Refused, at once, over a limit or when draining,
        and in place of what the engine raises. When the service is told to end without waiting any
        longer, the block is cancelled and Refused (``draining``) raised in its stead.
        """
        call = Call(method, len(prompt) // 4)
        with self.calling(client, call):
            self._admit(client, call)
            with self._stream(client), trio.CancelScope() as scope:
                self._open.add(scope)
                try:
                    async with self.engine.generate(
                        prompt,
                        params,
                        salt=client.tenant.salt,
                        timeout_s=timeout_s,
                        listener=listener,
                    ) as stream:
                        call.request = stream.request.id
                        try:
                            yield stream, call
                        finally:
                            call.output_tokens = len(stream.request.output)
                finally:
                    self._open.discard(scope)
            if scope.cancelled_caught:
                raise Refused("draining", "the server ended before the answer was complete")

    @contextmanager
    def calling(self, client: Client, call: Call) -> Generator[None]:
        """Count and log one call; turns the engine's errors into what clients are told."""
        self._last_call += 1
        number, started_s = self._last_call, trio.current_time()
        client.num_calls += 1
        self.doors[f"{client.door}_{call.method}"] += 1
        self._calls[client.tenant.name] += 1
        try:
            yield
        except KVLeaseError as error:
            raise self.note(client, call, error) from error
        except trio.Cancelled:
            call.code = "cancelled"
            raise
        finally:
            if self._log.normal:
                self._emit(
                    RpcCall(
                        client=client.id,
                        call=number,
                        method=call.method,
                        code=call.code,
                        request=call.request,
                        prompt_tokens=call.prompt_tokens,
                        output_tokens=call.output_tokens,
                        wall_us=round((trio.current_time() - started_s) * 1e6),
                        why=call.why,
                    )
                )

    def note(self, client: Client, call: Call, error: KVLeaseError) -> Refused:
        """Count a call as come to nothing; returns what its client is told."""
        refusal = refusal_of(error)
        call.code, call.why = refusal.code, str(refusal)
        self.refused[refusal.code] += 1
        self._tenant_refused[client.tenant.name] += 1
        return refusal

    def _admit(self, client: Client, call: Call) -> None:
        """Refuse a stream that is one too many, or a prompt that is too long."""
        limits, tenant = self.limits, client.tenant
        if self.status == "draining":
            raise self._draining()
        if call.prompt_tokens > limits.max_prompt_tokens:
            raise Refused(
                "too_large",
                f"the prompt has {call.prompt_tokens} tokens; {limits.max_prompt_tokens} may be"
                " given (max_prompt_tokens)",
            )
        bounds = (
            (client.num_streams, limits.max_streams_per_client, "max_streams_per_client"),
            (self._tenant_streams[tenant.name], tenant.max_streams, "the tenant's max_streams"),
            (self.num_streams, limits.max_streams, "max_streams"),
        )
        for count, bound, name in bounds:
            if bound is not None and count >= bound:
                raise Refused(
                    "too_many",
                    f"{count} answers are under way, as many as may ({name})",
                    self.engine.retry_after_s(),
                )

    @contextmanager
    def _stream(self, client: Client) -> Generator[None]:
        """Count a stream while it is open."""
        name = client.tenant.name
        client.num_streams += 1
        self._tenant_streams[name] += 1
        self.num_streams += 1
        if self.num_streams == 1:
            self._idle = trio.Event()
        try:
            yield
        finally:
            client.num_streams -= 1
            self._tenant_streams[name] -= 1
            self.num_streams -= 1
            if not self.num_streams:
                self._idle.set()

    def require_admin(self, client: Client, what: str) -> None:
        """Raise Refused unless the client's tenant runs the server."""
        if not client.tenant.is_admin:
            raise Refused("forbidden", f"{what} is for an admin tenant only")

    # -- the end -------------------------------------------------------------------------------

    async def drain(self) -> DrainReport:
        """Take no more calls and wait for those that run, up to the limit; then cut them short.

        Checkpoints: always. Any number may call it, and wait for the one end; if the one who does
        the work is cancelled, another goes on. A door waits for `drain_asked` and calls it too, so
        that it ends although whoever asked has gone.
        """
        if self.status != "draining":
            self.status = "draining"
            self._drain_end_s = trio.current_time() + self.limits.drain_timeout_s
            self.drain_asked.set()
            if self._log.normal:
                self._emit(RpcDrain(state="begin", streams=self.num_streams))
        async with self._drain_lock:
            if not self.drained.is_set():
                await self._finish()
        return DrainReport(self._cut)

    async def _finish(self) -> None:
        """Wait for the last stream, and for none of them too long."""
        with trio.CancelScope(deadline=self._drain_end_s):
            await self._idle.wait()
        self._cut = max(self._cut, self.num_streams)
        self.cutting.set()
        for scope in list(self._open):
            scope.cancel()
        await self._idle.wait()
        if self._log.normal:
            self._emit(RpcDrain(state="end", streams=0, cut=self._cut))
        self.drained.set()

    # -- accounts ------------------------------------------------------------------------------

    def health(self) -> Health:
        """Tell whether requests are taken."""
        return Health(
            status=self.status,
            version=__version__,
            model=self.engine.model_name,
            uptime_s=trio.current_time() - self._started_s,
            streams=self.num_streams,
        )

    def statistics(self, *, recount: bool = False) -> ServerStatistics:
        """Return counters and gauges; ``recount`` as in `Engine.statistics`."""
        now = self.engine.statistics(recount=recount)
        pools = {
            name: PoolCounts(**asdict(getattr(now, name)))
            for name in ("device", "host", "device_tails", "host_tails", "slots")
        }
        tenants = {
            name: TenantCounts(
                streams=self._tenant_streams[name],
                calls=self._calls[name],
                refused=self._tenant_refused[name],
                device_pages=self.engine.cache.share("device", salt=tenant.salt),
                host_pages=self.engine.cache.share("host", salt=tenant.salt),
            )
            for name, tenant in self.tenants.by_name.items()
        }
        return ServerStatistics(
            uptime_s=trio.current_time() - self._started_s,
            waiting=now.waiting,
            running=now.running,
            streams=self.num_streams,
            connections=len(self.clients),
            engine=asdict(now.counters),
            doors=dict(self.doors),
            refused=dict(self.refused),
            tool_call_errors=dict(self.tool_call_errors),
            pools=pools,
            tenants=tenants,
            ledger_ok=now.ledger_ok,
            ledger_error=now.ledger_error,
        )
