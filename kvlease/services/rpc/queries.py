"""Calls with one answer each: what a client asks about the server, or asks it to do.

This module knows the service, and neither sockets nor frames.
"""

from typing import TypeAlias

from kvlease.errors import Refused
from kvlease.protocols import rpc
from kvlease.services.serving.service import Call, Client, Service

Query: TypeAlias = (
    rpc.Prefetch | rpc.Pin | rpc.Unpin | rpc.Evict | rpc.Flush | rpc.GetStatistics
    | rpc.GetHealth | rpc.Drain | rpc.Subscribe
)  # fmt: skip


async def answer_query(service: Service, client: Client, query: Query) -> rpc.Answer:
    """Do what a client asks and return its answer; raises Refused.

    Checkpoints: where the engine has to be waited for.
    """
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
            case _:
                raise Refused("unavailable", "this server does not know the call")


_NAMES = {
    rpc.Prefetch: "prefetch",
    rpc.Pin: "pin",
    rpc.Unpin: "unpin",
    rpc.Evict: "evict",
    rpc.Flush: "flush",
    rpc.GetStatistics: "statistics",
    rpc.GetHealth: "health",
    rpc.Drain: "drain",
    rpc.Subscribe: "subscribe",
}
