"""The built-in workload: repeatable, of the promised sizes, and growing as sessions do."""

import itertools

import pytest

from kvlease.errors import ConfigError
from kvlease.services.sessions import num_tokens, pack, unpack
from kvlease.services.tool_calls.markup import Call, write_block
from kvlease.services.workload import (
    WorkloadShape,
    encode_bytes,
    has_markup_error,
    system_prompt,
    tool_agent_sessions,
)

SHAPE = WorkloadShape(turns=4, system_tokens=300)


def test_the_same_seed_gives_the_same_bytes() -> None:
    first = list(tool_agent_sessions(5, SHAPE, 256, seed=7))
    assert first == list(tool_agent_sessions(5, SHAPE, 256, seed=7))
    assert first != list(tool_agent_sessions(5, SHAPE, 256, seed=8))
    assert first[:3] == list(tool_agent_sessions(3, SHAPE, 256, seed=7))


def test_sessions_share_the_system_prompt_and_nothing_else() -> None:
    sessions = list(tool_agent_sessions(6, SHAPE, 256, seed=0))
    system = encode_bytes(system_prompt(300), 256)
    openings = [session.turns[0].added for session in sessions]
    assert all(opening.startswith(system) for opening in openings)
    for a, b in itertools.combinations(openings, 2):
        assert a[len(system) :] != b[len(system) :]


def test_sizes_stay_in_their_ranges() -> None:
    for session in tool_agent_sessions(40, SHAPE, 256, seed=1):
        assert len(session.turns) == 4
        task = num_tokens(session.turns[0].added) - 300
        assert SHAPE.task_tokens[0] <= task <= SHAPE.task_tokens[1]
        for turn in session.turns[1:]:
            low, high = SHAPE.result_tokens
            assert low <= num_tokens(turn.added) <= high
            assert 0 <= turn.pause_s <= SHAPE.pause_s
        longest = sum(num_tokens(t.added) + t.sampling.max_tokens for t in session.turns)
        assert longest <= SHAPE.longest


def test_both_ways_of_drawing_occur() -> None:
    sessions = list(tool_agent_sessions(2, SHAPE, 256, seed=0))
    assert {s.turns[0].sampling.temperature for s in sessions} == {0.0, 0.8}


def test_a_small_vocabulary_folds_the_bytes() -> None:
    tokens = unpack(encode_bytes("zebra €", 100))
    assert max(tokens) < 100
    assert len(tokens) == len("zebra €".encode())


def test_tokens_pack_as_int32() -> None:
    assert unpack(pack([0, 1, 2**31 - 1])) == [0, 1, 2**31 - 1]
    assert num_tokens(pack(range(5))) == 5


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ({"turns": 0}, "turns is 0"),
        ({"system_tokens": 0}, "system_tokens is 0"),
        ({"answer_tokens": (5, 4)}, "answer_tokens is 5 to 4"),
    ],
)
def test_sizes_that_make_no_session_are_refused(shape: dict[str, int], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        WorkloadShape(**shape)  # type: ignore[arg-type]  # wrong on purpose, by value


CALL = b"So: " + write_block([Call("search", '{"limit": {"most": 3}}')]).encode()


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (b"plain text", False),
        (CALL, False),
        (CALL[:-30], True),
        (CALL[40:], True),
        (CALL.replace(b"{", b"["), True),
        (CALL.replace(b"search", b"search_v3"), False),
        (CALL.replace(b"search", b"serach"), True),
    ],
)
def test_malformed_markup_is_seen(answer: bytes, wrong: bool) -> None:
    assert has_markup_error(answer) is wrong
