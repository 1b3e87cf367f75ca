"""Any number of any line may be absurd: it is seen, or named here as free, and costs no time."""

from collections.abc import Iterator
from typing import TypeAlias, cast

import msgspec
import pytest

from kvlease.protocols import events as ev
from kvlease.services.replay.checker import check
from tests.replay.build import Builder, head, lines_of, story
from tests.replay.plant import change

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int"
Path: TypeAlias = tuple[str | int, ...]

EVENTS = story().events
LINES = [cast("Json", msgspec.json.decode(text)) for text in lines_of(EVENTS).splitlines()]
FREE = {
    ("request.submitted", "max_tokens"): "a larger limit",
    ("request.submitted", "deadline_ns"): "a later one, or none",
    ("transfer.plan", "deadline_ns"): "its owner judges it",
    ("lease.wait", "deadline_ns"): "its owner judges it",
    ("lease.wait", "step"): "the step's name, if it is over in time",
    ("step.done", "step"): "a name that nothing waits for",
    ("step.discarded", "read"): "a step that published nothing",
    ("step.read", "stalls"): "whose stall it was, and how long, is only counted",
    ("step.read", "opens"): "earlier than it was: stricter for the step",
    ("lease.close", "opens"): "earlier than it was: stricter for the reader",
    ("page.evict", "tails"): "kept tails have no lines of their own",
    ("page.quarantine", "pages"): "another cached page was given up",
    ("page.free", "pages"): "another cached page was given up",
    ("log.close", "t_ns"): "the end may come later",
}
"""Numbers of the story that may have another value in a clean log, and why."""


def numbers(value: Json, path: Path = ()) -> Iterator[Path]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from numbers(inner, (*path, index))
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path


def changed(value: Json, path: Path, number: int) -> Json:
    if not path:
        return number
    if isinstance(value, dict):
        key = cast("str", path[0])
        return {**value, key: changed(value[key], path[1:], number)}
    assert isinstance(value, list)
    return [
        changed(inner, path[1:], number) if index == path[0] else inner
        for index, inner in enumerate(value)
    ]


@pytest.mark.parametrize("number", [-(1 << 31), -1, 1 << 31, (1 << 63) - 1])
def test_no_absurd_number_passes_unseen(number: int) -> None:
    decoder = msgspec.json.Decoder(cast("type[ev.Event]", ev.AnyEvent))
    unseen = set[tuple[str, str]]()
    for at, line in enumerate(LINES[1:], 1):
        assert isinstance(line, dict)
        for path in numbers(line):
            text = msgspec.json.encode(changed(line, path, number))
            events = [*EVENTS[:at], decoder.decode(text), *EVENTS[at + 1 :]]
            if check(events).verdict == "clean":
                name = [part for part in path if isinstance(part, str)][-1]
                unseen.add((cast("str", line["event"]), name))
    assert unseen <= set(FREE)


def test_absurd_pages_of_bytes_that_have_not_landed_are_no_pages() -> None:
    """Pages are told apart one by one there: only those that exist."""
    log = Builder().add(head(ports={"simulated": True}))
    log.add(ev.TransferPlan(
        transfer=1, direction="load", source_tier="host", source=[(0, 2, 0)],
        source_lease=8, destination_tier="device", destination=[(0, 1 << 40, 0), (0, -9, 0)],
        destination_lease=9, layers=(0, 1 << 40), components=["latent"], nbytes=1 << 40,
        deadline_ns=0, owner="loader",
    ))  # fmt: skip
    log.open(9, (0, 1 << 40, 0), transfer=1)
    log.add(ev.TransferRecord(transfer=1, layers=(0, 1 << 40)))
    log.add(ev.TransferLayerDone(transfer=1, layers=(0, 1 << 40), nbytes=1))
    log.add(ev.TransferLayerDone(transfer=1, layers=(1 << 40, 1), nbytes=1))
    log.add(ev.TransferDone(transfer=1, nbytes=1))
    log.add(ev.PageReserve(pages=[(0, 2, 0)], lease=9))
    log.add(ev.PageSeal(pages=[(0, 2, 0), (0, 1 << 40, 0)], lease=9))
    log.add(ev.PageFree(pages=[(5, 1 << 40, 0), (0, 2, 0)]))
    log.close(9)
    verdict = check(log.close_log().events)
    assert {"R5", "R7", "R8", "R11", "R14"} <= set(verdict.violation_counts)


def test_a_seal_of_no_page_is_no_seal() -> None:
    events = story().events
    change(ev.PageSeal, 0, pages=[], start=1 << 40)(events)
    assert check(events).verdict == "violations"


def test_a_request_admitted_again_may_use_what_it_had_generated() -> None:
    log = Builder().add(head())
    log.submit(1, prompt=16, output=40)
    log.open(1, request=1)
    log.admit(1)
    log.add(ev.PageReserve(pages=[(0, 3, 0)], lease=1, request=1))
    log.step(1, ev.Row(1, 1, 0, 33, 18))
    log.add(ev.PageSeal(pages=[(0, 2, 0)], lease=1, request=1))
    log.add(ev.RequestPreempted(request=1, reason="room", kept_tokens=32, dropped_tokens=1))
    log.close(1)
    log.open(2, (0, 2, 0), request=1)
    log.admit(1, 32, again=True)
    verdict = check(log.events)
    assert not verdict.violation_counts
    log.events[-1] = msgspec.structs.replace(log.events[-1], again=False)
    assert check(log.events).violation_counts == {"R14": 1}
