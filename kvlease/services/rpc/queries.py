"""Calls with one answer each: what a client asks about the server, or asks it to do.

This module knows the service, and neither sockets nor frames.
"""

from typing import TypeAlias

from kvlease.protocols import rpc
from kvlease.services.serving.service import Call, Client, Service

Query: TypeAlias = (
    rpc.Prefetch | rpc.Pin | rpc.Unpin | rpc.Evict | rpc.Flush | rpc.GetStatistics
    | rpc.GetHealth | rpc.Drain
)  # fmt: skip


async def answer_query(service: Service, client: Client, query: Query) -> rpc.Answer:
    """Do what a client asks and return its answer; raises Refused.

    Checkpoints: where the engine has to be waited for.
    """
    cache, salt = service.engine.cache, client.tenant.salt
    with service.calling(client, Call(_NAMES[type(query)])):
        match query:
            case rpc.GetHealth():
                return rpc.HealthIs(query.call, service.health())
            case rpc.GetStatistics():
                service.require_admin(client, "statistics")
                return rpc.StatisticsAre(query.call, service.statistics(recount=query.recount))
            case rpc.Drain():
                service.require_admin(client, "drain")
                return rpc.Drained(query.call, (await service.drain()).cut)
            case rpc.Flush():
                service.require_admin(client, "flush")
                await service.engine.flush()
                return rpc.Flushed(query.call)
            case rpc.Prefetch():
                warm = await cache.prefetch(query.prompt, query.tier, salt=salt)
                return rpc.Prefetched(query.call, warm.tokens, warm.moved_tokens)
            case rpc.Pin():
                pin = await cache.pin(query.prompt, query.seconds, salt=salt)
                return rpc.Pinned(query.call, pin.pin, pin.tokens)
            case rpc.Unpin():
                return rpc.Unpinned(query.call, await cache.unpin(query.pin, salt=salt))
            case rpc.Evict():
                out = await cache.evict(query.prefix, query.tier, salt=salt)
                return rpc.Evicted(query.call, out.device_pages, out.host_pages, out.kept_pages)


_NAMES = {
    rpc.Prefetch: "prefetch",
    rpc.Pin: "pin",
    rpc.Unpin: "unpin",
    rpc.Evict: "evict",
    rpc.Flush: "flush",
    rpc.GetStatistics: "statistics",
    rpc.GetHealth: "health",
    rpc.Drain: "drain",
}
