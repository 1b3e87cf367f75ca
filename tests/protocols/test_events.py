"""The log's vocabulary: names are unique, every event survives the file, runs fold and unfold."""

import itertools
import types
import typing

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.protocols import events
from kvlease.protocols.events import (
    AnyEvent,
    Event,
    LeaseClose,
    Opening,
    RequestFinished,
    Row,
    StepDone,
)
from kvlease.protocols.geometries import V4Geometry, deepseek_v4_schema

EVENT_TYPES: tuple[type[Event], ...] = typing.get_args(AnyEvent)
FAMILIES = {"log", "request", "page", "lease", "transfer", "step", "actor", "rpc"}


def tag_of(event_type: type[Event]) -> str:
    tag = event_type.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def sample(annotation: object) -> object:
    """Some value of an annotated field."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return typing.get_args(annotation)[-1]
    if origin is list:
        return [sample(typing.get_args(annotation)[0])]
    if origin is tuple:
        return tuple(sample(arg) for arg in typing.get_args(annotation))
    if origin is dict:
        return {"new": 3}
    if origin is types.UnionType:
        return sample(typing.get_args(annotation)[0])
    if annotation is bytes:
        return b"\x01\x02"
    if annotation is int:
        return 7
    if annotation is str:
        return "word"
    if annotation is bool:
        return True
    assert isinstance(annotation, type)
    if attrs.has(annotation):
        return annotation()
    assert issubclass(annotation, msgspec.Struct)
    return build(annotation)


def build(struct: type[msgspec.Struct]) -> msgspec.Struct:
    hints = typing.get_type_hints(struct)
    return struct(**{f.name: sample(hints[f.name]) for f in msgspec.structs.fields(struct)})


def test_tags_are_unique_and_of_a_known_family() -> None:
    tags = [tag_of(t) for t in EVENT_TYPES]
    assert len(set(tags)) == len(tags)
    assert {tag.split(".")[0] for tag in tags} == FAMILIES


def test_the_union_holds_every_event_that_exists() -> None:
    """An event outside the union would be written and never read back."""
    made = {
        value
        for value in vars(events).values()
        if isinstance(value, type) and issubclass(value, Event)
    }
    assert made - set(EVENT_TYPES) == {Event, events.NormalEvent}


@pytest.mark.parametrize("event_type", EVENT_TYPES, ids=tag_of)
def test_every_event_survives_a_line(event_type: type[Event]) -> None:
    event = build(event_type)
    line = msgspec.json.encode(event)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=AnyEvent) == event
    assert msgspec.json.decode(line)["event"] == tag_of(event_type)


def test_normal_keeps_requests_actors_and_what_went_wrong() -> None:
    normal = {tag_of(t) for t in EVENT_TYPES if not t.audit}
    assert {t for t in normal if t.startswith("request.")} == {
        tag_of(t) for t in EVENT_TYPES if tag_of(t).startswith("request.")
    }
    assert {"transfer.fail", "transfer.late", "step.discarded"} <= normal
    assert {t for t in normal if t.startswith("page.")} == {
        f"page.{what}" for what in ("mismatch", "flush", "pin", "unpin")
    }


def test_defaults_stay_off_the_line() -> None:
    """A decode step is the commonest line; what is default costs no bytes."""
    line = msgspec.json.encode(StepDone(step=5, read=3, rows=[Row(1, 2, 30, 1, 1)]))
    assert line == b'{"event":"step.done","step":5,"read":3,"rows":[[1,2,30,1,1]]}'


def test_two_events_never_share_an_empty_list() -> None:
    first, second = LeaseClose(lease=1), LeaseClose(lease=2)
    first.opens.append(Opening(1, 0, 1, 0))
    assert second.opens == []


def test_an_unknown_event_is_refused_by_the_union() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"rpc\.paid"):
        msgspec.json.decode(b'{"event":"rpc.paid"}', type=AnyEvent)


def test_usage_is_part_of_the_terminal_event() -> None:
    """Without the buckets in the terminal event R12 could not be decided from the log."""
    assert typing.get_type_hints(RequestFinished)["usage"] is events.Usage


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=40))
def test_runs_unfold_to_the_same_pages(pairs: list[tuple[int, int]]) -> None:
    runs = events.runs_of([p for p, _ in pairs], [e for _, e in pairs])
    assert [(first + i, epoch) for first, n, epoch in runs for i in range(n)] == pairs
    for (a, n, e), (b, _, f) in itertools.pairwise(runs):
        assert (a + n, e) != (b, f), "neighbours of one epoch belong in one run"


def test_the_head_states_every_component_of_a_schema() -> None:
    """A checker recomputes planned bytes from the head, so the head has to add up."""
    geometry = V4Geometry(("sliding", "sparse", "heavy", "sparse"), 32, 8, 16, 24)
    schema = deepseek_v4_schema(geometry, 128, "float32", "same", "bf16")
    facts = events.component_facts(schema)
    assert {f.name for f in facts} == set(schema.component_names())
    spans = sum(f.nbytes * len(f.layers) for f in facts if f.kind == "span")
    tails = sum(f.nbytes * len(f.layers) for f in facts if f.kind == "tail")
    assert (spans, tails) == (schema.page_nbytes, schema.tail_nbytes)
    assert [f.layers for f in facts if f.name == "latent"] == [[1, 3], [2]]
