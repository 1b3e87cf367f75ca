"""The trace is what ui.perfetto.dev opens: tracks in order, spans and flows with both ends."""

import io
import json
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.protocols import events as ev
from kvlease.services.replay import timeline_steps
from kvlease.services.replay.perfetto import write_trace
from kvlease.services.replay.verdict import Violation
from tests.replay.scene import found, numbered, scene

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Entry = dict[str, Any]


def trace_of(events: Sequence[ev.Event], violations: Sequence[Violation] = ()) -> list[Entry]:
    file = io.BytesIO()
    write_trace(file, numbered(events), violations)
    entries = json.loads(file.getvalue())["traceEvents"]
    assert isinstance(entries, list)
    return entries


def of(entries: list[Entry], phase: str) -> list[Entry]:
    return [entry for entry in entries if entry["ph"] == phase]


def slices(entries: list[Entry]) -> dict[tuple[int, int], list[Entry]]:
    tracks: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for entry in of(entries, "X"):
        tracks[entry["pid"], entry["tid"]].append(entry)
    return tracks


def check_structure(entries: list[Entry]) -> None:
    """Everything Perfetto relies on, whatever the log."""
    assert all(entry.get("ts", 0) >= 0 and entry.get("dur", 0) >= 0 for entry in entries)
    for track in slices(entries).values():
        starts = [entry["ts"] for entry in track]
        assert starts == sorted(starts)
        open_until: list[float] = []
        for entry in track:  # each nests in what is open, or comes after it
            end = entry["ts"] + entry["dur"]
            while open_until and open_until[-1] <= entry["ts"] + 0.002:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002, entry
            open_until.append(end)
    balance: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry["ph"] in "be":
            balance[entry["cat"], entry["id"]].append(entry)
    for pair in balance.values():
        assert [entry["ph"] for entry in pair] == ["b", "e"] * (len(pair) // 2)
        assert [entry["ts"] for entry in pair] == sorted(entry["ts"] for entry in pair)
    starts, ends = of(entries, "s"), of(entries, "f")
    assert [entry["id"] for entry in starts] == [entry["id"] for entry in ends]
    for entry in starts + ends:
        track = slices(entries)[entry["pid"], entry["tid"]]
        assert any(x["ts"] <= entry["ts"] <= x["ts"] + x["dur"] for x in track)


def test_the_scene_is_a_well_formed_trace() -> None:
    entries = trace_of(scene())
    check_structure(entries)
    names = {entry["name"] for entry in of(entries, "X")}
    assert {
        "prefill 1",
        "decode 2",
        "discarded 3",
        "load 1",
        "load 2",
        "layer 0",
        "layer 1",
    } == names
    tracks = {entry["args"]["name"] for entry in of(entries, "M")}
    assert {"prefill steps", "loads", "loads, lane 2", "actor loader", "ledger"} <= tracks


def test_layers_lie_in_their_transfer_one_after_the_other() -> None:
    entries = trace_of(scene())
    by_name = {entry["name"]: entry for entry in of(entries, "X")}
    load, first, second = by_name["load 1"], by_name["layer 0"], by_name["layer 1"]
    assert load["ts"] <= first["ts"] < first["ts"] + first["dur"] <= second["ts"]
    assert second["ts"] + second["dur"] <= load["ts"] + load["dur"]
    assert by_name["load 2"]["args"]["reason"] == "the link broke"


def test_a_flow_leads_from_a_load_to_the_step_that_read_it_first() -> None:
    entries = trace_of(scene())
    (start,), (end,) = of(entries, "s"), of(entries, "f")
    by_name = {entry["name"]: entry for entry in of(entries, "X")}
    assert start["tid"] == by_name["load 1"]["tid"]
    assert end["tid"] == by_name["prefill 1"]["tid"]
    assert end["bp"] == "e"


def test_leases_requests_and_waits_are_asynchronous_spans() -> None:
    entries = trace_of(scene())
    opened = {(entry["cat"], entry["id"]): entry for entry in of(entries, "b")}
    assert {("lease", f"l{lease}") for lease in (10, 11, 12, 20, 21, 22)} <= set(opened)
    assert opened["lease", "l20"]["args"]["open at the end"]
    assert not opened["lease", "l10"]["args"]["open at the end"]
    phases = [entry["name"] for entry in of(entries, "b") if entry["cat"] == "request"]
    assert phases.count("request 1 prefill") == phases.count("request 1 decode") == 1
    waits = [entry for entry in of(entries, "b") if entry["cat"] == "wait"]
    assert [wait["args"]["stood still (us)"] for wait in waits] == [1500, None]
    assert [wait["args"]["requests"] for wait in waits] == [[1], [2]]


def test_counters_add_up_to_the_pool() -> None:
    counters = of(trace_of(scene()), "C")
    totals = {"device pages": 8, "host pages": 16}
    assert {counter["name"] for counter in counters} == set(totals)
    for counter in counters:
        assert sum(counter["args"].values()) == totals[counter["name"]]
        assert min(counter["args"].values()) >= 0
    quarantined = [c["args"]["quarantined"] for c in counters if c["name"] == "device pages"]
    assert max(quarantined) == 2
    last = [c["args"] for c in counters if c["name"] == "device pages"][-1]
    assert last == {"leased": 0, "cached": 2, "quarantined": 0, "free": 6}


def test_a_violation_is_an_instant_where_it_shows() -> None:
    events = scene()
    (instant,) = [e for e in of(trace_of(events, found(events).violations), "i") if e["s"] == "g"]
    assert instant["name"].startswith("R2: layer 1 was opened")
    assert instant["ts"] == (events[26].t_ns - events[0].t_ns) / 1000
    assert instant["args"]["lines"] == [8, 17, 21, 27]


@given(st.data())
def test_a_log_with_lines_lost_or_out_of_order_is_drawn_all_the_same(data: st.DataObject) -> None:
    """Nothing is judged here, so nothing may be relied on."""
    events = scene()
    kept = data.draw(st.lists(st.sampled_from(range(len(events))), max_size=len(events)))
    in_order = data.draw(st.booleans())
    chosen = [events[k] for k in (sorted(set(kept)) if in_order else kept)]
    entries = trace_of([msgspec.structs.replace(event) for event in chosen])
    if in_order:
        check_structure(entries)


def _endless(count: int) -> Iterator[tuple[int, ev.Event]]:
    """Requests of two lines each, one after the other, in steps of a batch of one."""
    for line in range(1, count + 1):
        request = line // 4 + 1
        event: ev.Event
        match line % 4:
            case 0:
                event = ev.RequestSubmitted(request=request, prompt_tokens=5, max_tokens=1)
            case 1:
                event = ev.LeaseOpen(lease=request, mode="shared", pages=[], request=request)
            case 2:
                event = ev.StepDone(step=request, read=1, rows=[ev.Row(request, request, 0, 5, 1)])
            case _:
                event = ev.LeaseClose(lease=request)
        event.seq, event.t_ns = line, line * 1000
        yield line, event
        if line % 4 == 3:
            done = ev.RequestFinished(request=request, reason="stop", usage=ev.Usage(prompt=5))
            done.seq, done.t_ns = line, line * 1000
            yield line, done


class _Nowhere(io.BytesIO):
    def write(self, data: "ReadableBuffer", /) -> int:
        return memoryview(data).nbytes


def _peak(count: int) -> int:
    tracemalloc.start()
    try:
        write_trace(_Nowhere(), _endless(count), [])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_steps, "RECENT", 500)
    _peak(100)  # what is loaded once
    assert _peak(15_000) < _peak(3_000) + 200_000
