"""What Prometheus reads: the engine's and the service's own figures, in the form it takes.

Everything is read from its one owner when it is asked for; nothing is counted here. Names and
meanings are listed in docs/http.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvlease.version import __version__

if TYPE_CHECKING:
    from kvlease.protocols.rpc import ServerStatistics
    from kvlease.runtime.figures import Histogram
    from kvlease.services.serving.service import Service

COUNTERS: Final = {
    "requests": ("requests", "Requests that were taken"),
    "preempted": ("preemptions", "Running requests that gave their pages back for others"),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts"),
    "output_tokens": ("output_tokens", "Tokens of answers"),
    "computed_tokens": ("computed_tokens", "Prompt tokens that were computed"),
    "recomputed_tokens": ("recomputed_tokens", "Tokens that were computed again"),
    "steps": ("steps", "Steps of the model"),
    "discarded_steps": ("discarded_steps", "Steps that published nothing"),
    "failed_transfers": ("failed_transfers", "Transfers that came to nothing"),
    "transfer_timeouts": ("transfer_timeouts", "Transfers that outlived their deadline"),
    "skipped_stores": ("skipped_stores", "Pages that were not stored for want of room"),
    "restored_bytes": ("restored_bytes", "Bytes loaded from lower tiers"),
    "stored_bytes": ("stored_bytes", "Bytes stored to lower tiers"),
    "gate_waits": ("gate_waits", "Layers that readers were made to wait for"),
    "gate_wait_s": ("gate_wait_seconds", "Time that compute stood still for transfers"),
    "recompute_choices": ("recompute_choices", "Prefixes computed though a tier held them"),
    "audited_pages": ("audited_pages", "Pages compared with their sums"),
    "audit_mismatches": ("audit_mismatches", "Pages that were found changed"),
    "actor_restarts": ("actor_restarts", "Actors that were started in a dead one's place"),
}
"""Counters of the engine by field, with their name and help."""
ELSEWHERE: Final = frozenset(
    ["hit_device", "hit_host", "loads", "stores", "finished", "failed", "cancelled", "rejected"]
)
"""Fields that are told by label: tier, kind, the reason of an end, the code of a refusal."""
_STATES = ("free", "reserved", "held", "sealed", "quarantined")


@final
class ServiceCollector(Collector):
    """Reads one service; asked on the Trio thread."""

    def __init__(self, service: Service) -> None:
        """Borrows the service."""
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield every family there is."""
        now = self._service.statistics()
        yield from self._about(now)
        yield from self._engine(now)
        yield from self._requests(now)
        yield from self._pools(now)
        yield from self._stalls()
        yield from self._tenants(now)

    def _about(self, now: ServerStatistics) -> Iterator[Metric]:
        info = {"version": __version__, "model": self._service.engine.model_name}
        yield InfoMetricFamily("kvlease", "What is served", info)
        yield _gauge("uptime_seconds", "Time since the service began", now.uptime_s)
        draining = self._service.status == "draining"
        yield _gauge("draining", "Whether it ends and takes no more", draining)
        yield _gauge("waiting_requests", "Requests in the queue", now.waiting)
        yield _gauge("running_requests", "Requests that are computed", now.running)
        yield _gauge("streams", "Answers under way to their clients", now.streams)
        yield _gauge("clients", "Clients that are there", now.connections)
        overdue = self._service.engine.num_overdue()
        yield _gauge("overdue_requests", "Requests open after their deadline", overdue)

    def _engine(self, now: ServerStatistics) -> Iterator[Metric]:
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(f"kvlease_{name}", text, now.engine[field])
        hits = CounterMetricFamily(
            "kvlease_hit_tokens", "Prompt tokens found cached, by tier", labels=["tier"]
        )
        for tier in ("device", "host", "storage", "remote"):
            hits.add_metric([tier], now.engine.get(f"hit_{tier}", 0))
        yield hits
        kinds = {"load": now.engine["loads"], "store": now.engine["stores"]}
        yield _by_label("transfers", "Transfers that were planned", "kind", kinds)
        figures = self._service.engine.figures
        yield _histogram("ttft_seconds", "Time from a request to its first token", figures.ttft_s)
        yield _histogram("tpot_seconds", "Mean time of an answer's later tokens", figures.tpot_s)

    def _requests(self, now: ServerStatistics) -> Iterator[Metric]:
        ended = self._service.engine.figures.ended
        yield _by_label("requests_ended", "Requests by how they ended", "reason", ended)
        yield _by_label("refused", "Calls that were turned away or failed", "code", now.refused)
        errors = now.tool_call_errors
        yield _by_label("tool_call_errors", "Malformed tool calls", "reason", errors)
        yield _by_label("door_events", "Clients and calls of each door", "event", now.doors)

    def _pools(self, now: ServerStatistics) -> Iterator[Metric]:
        pages = GaugeMetricFamily(
            "kvlease_pages", "Pages and slots by pool and state", labels=["pool", "state"]
        )
        for pool, counts in now.pools.items():
            for state in _STATES:
                pages.add_metric([pool, state], getattr(counts, state))
        yield pages
        sizes = {pool: counts.total for pool, counts in now.pools.items()}
        capacity = GaugeMetricFamily("kvlease_capacity_pages", "Pools' sizes", labels=["pool"])
        for pool, total in sizes.items():
            capacity.add_metric([pool], total)
        yield capacity
        yield _gauge("ledger_ok", "Whether every pool's pages add up", now.ledger_ok)

    def _stalls(self) -> Iterator[Metric]:
        waits = CounterMetricFamily(
            "kvlease_exposed_stalls", "Times that compute stood still", labels=["tier", "layer"]
        )
        seconds = CounterMetricFamily(
            "kvlease_exposed_stall_seconds",
            "How long compute stood still, by the tier it waited for, and layer",
            labels=["tier", "layer"],
        )
        for (tier, layer), total in sorted(self._service.engine.stalls().items()):
            waits.add_metric([tier, str(layer)], total.waits)
            seconds.add_metric([tier, str(layer)], total.seconds)
        yield waits
        yield seconds

    def _tenants(self, now: ServerStatistics) -> Iterator[Metric]:
        streams = GaugeMetricFamily(
            "kvlease_tenant_streams", "Answers under way", labels=["tenant"]
        )
        pages = GaugeMetricFamily(
            "kvlease_tenant_pages", "Cached pages of a tenant", labels=["tenant", "tier"]
        )
        for name, counts in now.tenants.items():
            streams.add_metric([name], counts.streams)
            pages.add_metric([name, "device"], counts.device_pages)
            pages.add_metric([name, "host"], counts.host_pages)
        yield streams
        yield pages


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvlease_{name}", text, value)


def _by_label(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"kvlease_{name}", text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _histogram(name: str, text: str, samples: Histogram) -> Metric:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip([*samples.bounds, float("inf")], samples.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
    return HistogramMetricFamily(f"kvlease_{name}", text, buckets, samples.sum)


def metrics_of(service: Service) -> Callable[[], bytes]:
    """Return what renders a service's figures, from a registry of its own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServiceCollector(service))

    def render() -> bytes:
        return generate_latest(registry)

    return render
