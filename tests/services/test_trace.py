"""The trace format: sharing is the trace's own, and a bad line is named."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import BadInput, ConfigError, TraceError
from kvlease.services.sessions import unpack
from kvlease.services.trace import TraceRequest, prompt_of, read_trace, trace_sessions

GOOD = '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}\n'


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines))
    return path


def request(tokens: int, *ids: int, block: int = 512) -> TraceRequest:
    return TraceRequest(1, tokens, 1, block, ids)


def test_lengths_and_ids_come_through(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "\n", GOOD.replace("1000", "513"))
    first, second = read_trace(path)
    assert (first.line, first.prompt_tokens, first.output_tokens) == (1, 1000, 5)
    assert (second.line, second.prompt_tokens, second.hash_ids) == (3, 513, (0, 7))


def test_the_limit_stops_before_a_bad_line(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "broken\n")
    assert len(list(read_trace(path, limit=1))) == 1


def test_scaling_divides_lengths_and_blocks(tmp_path: Path) -> None:
    (scaled,) = read_trace(write(tmp_path, GOOD), scale=8)
    assert (scaled.prompt_tokens, scaled.output_tokens, scaled.block_tokens) == (125, 1, 64)
    assert len(unpack(prompt_of(scaled, 50))) == 125


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=4),
    st.lists(st.integers(0, 50), min_size=1, max_size=4),
    st.integers(1, 512),
    st.integers(1, 512),
)
def test_prompts_share_exactly_what_their_ids_share(
    a: list[int], b: list[int], last_a: int, last_b: int
) -> None:
    """The hit rate of a replayed trace is the trace's own only if this holds."""
    x, y = (
        np.frombuffer(prompt_of(request(512 * (len(ids) - 1) + last, *ids), 1 << 20), np.int32)
        for ids, last in ((a, last_a), (b, last_b))
    )
    blocks = next((i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), None)
    shared = min(len(x), len(y)) if blocks is None else min(512 * blocks, len(x), len(y))
    assert (x[:shared] == y[:shared]).all()
    if blocks is not None and min(len(x), len(y)) - shared >= 4:
        assert (x[shared : shared + 4] != y[shared : shared + 4]).any()


def test_equal_ids_give_equal_tokens_at_any_place() -> None:
    one = np.frombuffer(prompt_of(request(1536, 3, 4, 5), 1000), np.int32)
    other = np.frombuffer(prompt_of(request(1024, 4, 3), 1000), np.int32)
    assert (one[512:1024] == other[:512]).all()
    assert (one[:512] == other[512:]).all()


@pytest.mark.parametrize("vocab", [2, 259, 129280, 2**31 - 1])
def test_tokens_stay_in_the_vocabulary_and_use_it(vocab: int) -> None:
    tokens = np.frombuffer(prompt_of(request(4096, *range(8)), vocab), np.int32)
    assert tokens.min() >= 0
    assert tokens.max() < vocab
    assert len(np.unique(tokens)) > min(vocab, 4096) * 0.6


def test_a_request_becomes_a_session_of_one_turn(tmp_path: Path) -> None:
    (session,) = trace_sessions(read_trace(write(tmp_path, GOOD)), 259)
    (turn,) = session.turns
    assert session.name == "line 1"
    assert len(unpack(turn.added)) == 1000
    assert (turn.sampling.max_tokens, turn.sampling.ignore_eos) == (5, True)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "Input data was truncated"),
        ("[1]", "Expected `object`"),
        (GOOD.replace("1000", '"x"'), r"Expected `int`, got `str` - at `\$.input_length`"),
        (GOOD.replace('"output_length": 5, ', ""), "missing required field `output_length`"),
        (GOOD.replace("1000", "-3"), "input_length is -3"),
        (GOOD.replace('"output_length": 5', '"output_length": 0'), "output_length is 0"),
        (GOOD.replace("1000", "1025"), "2 hash_ids for 1025 tokens; blocks of 512 make 3"),
        (GOOD.replace("[0, 7]", "[0, -7]"), "a hash id is outside"),
        ("\xff\n", "invalid"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD.encode() + line.encode("latin-1"))
    with pytest.raises(TraceError, match=rf"trace.jsonl:2: .*{why}"):
        list(read_trace(path))


def test_a_missing_file_an_empty_file_and_wrong_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read the trace .*nothing: No such file"):
        list(read_trace(tmp_path / "nothing"))
    with pytest.raises(TraceError, match="holds no request"):
        list(read_trace(write(tmp_path)))
    with pytest.raises(ConfigError, match="limit is 0"):
        list(read_trace(write(tmp_path, GOOD), limit=0))
    with pytest.raises(ConfigError, match="scale is 3; give a divisor of 512"):
        list(read_trace(write(tmp_path, GOOD), scale=3))
