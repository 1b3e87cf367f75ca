"""What Prometheus reads: every figure, once, and the same as its owner has it."""

from __future__ import annotations

import re

import attrs
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvlease.runtime.counters import Counters
from kvlease.runtime.figures import Histogram
from kvlease.services.serving.metrics import COUNTERS, ELSEWHERE
from kvlease.services.tool_calls.markup import SEPARATOR, Call, write_block
from tests.http.rig import MODEL, Server, open_server, user
from tests.tidy.rules import ROOT


async def scraped(server: Server) -> dict[str, float]:
    """Every sample by name and labels, as a scraper parses them."""
    async with server.plain() as client:
        got = await client.get("/metrics")
        assert got.status_code == 200
        assert got.headers["content-type"].startswith("text/plain")
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(got.text):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in samples, "told twice"
            samples[name] = sample.value
    return samples


def test_every_counter_of_the_engine_is_told() -> None:
    """A counter that is added and not told would be missed when it is needed."""
    fields = {field.name for field in attrs.fields(Counters)}
    assert fields == set(COUNTERS) | ELSEWHERE
    assert not set(COUNTERS) & ELSEWHERE


async def test_figures_are_those_of_their_owners() -> None:
    garbled = SEPARATOR + write_block([Call("rm", "{}")])
    async with open_server("abc", garbled) as server, server.client() as client:
        await client.chat.completions.create(model=MODEL, messages=[user("x" * 200)])
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model=MODEL, messages=[user("x" * 200)])
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=[user("x")])
        samples = await scraped(server)
        now = server.engine.statistics()
        assert samples["kvlease_requests_total"] == now.counters.requests == 2
        assert samples["kvlease_prompt_tokens_total"] == now.counters.prompt_tokens
        assert samples["kvlease_hit_tokens_total{tier=device}"] == now.counters.hit_device > 0
        assert samples["kvlease_hit_tokens_total{tier=remote}"] == 0
        assert samples["kvlease_requests_ended_total{reason=stop}"] == 1
        assert samples["kvlease_requests_ended_total{reason=cancelled}"] == 1
        assert samples["kvlease_refused_total{code=bad_request}"] == 1
        assert samples["kvlease_refused_total{code=failed}"] == 1
        assert samples["kvlease_tool_call_errors_total{reason=unknown_tool}"] == 1
        assert samples["kvlease_door_events_total{event=http_chat}"] == 2
        assert samples["kvlease_ttft_seconds_count"] == 2
        assert samples["kvlease_ttft_seconds_bucket{le=+Inf}"] == 2
        assert samples["kvlease_tpot_seconds_sum"] > 0
        assert samples["kvlease_ledger_ok"] == 1
        assert samples["kvlease_overdue_requests"] == 0
        states = {k: v for k, v in samples.items() if k.startswith("kvlease_pages{pool=device,")}
        assert sum(states.values()) == samples["kvlease_capacity_pages{pool=device}"] == 256
        assert states["kvlease_pages{pool=device,state=sealed}"] == now.device.sealed > 0
        assert (
            samples[f"kvlease_info{{model={MODEL},version={server.service.health().version}}}"] == 1
        )


async def test_every_figure_is_documented() -> None:
    """Operators find the meaning of a figure in docs/http.md, or not at all."""
    async with open_server() as server, server.plain() as client:
        text = (await client.get("/metrics")).text
    told = {family.name for family in text_string_to_metric_families(text)}
    documented = set(re.findall(r"`(kvlease_\w+)`", (ROOT / "docs" / "http.md").read_text()))
    assert told == documented - {"kvlease_tool_call_errors_total"}


def test_a_histogram_puts_every_sample_under_one_bound() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == 14.0
