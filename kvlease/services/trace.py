"""Workload traces in the Mooncake JSONL format, turned into requests with tokens.

A line has ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and ``hash_ids``, one
id for each block of 512 tokens of the prompt, the last one possibly partial. The trace holds no
text, so tokens are derived from the ids: equal ids give equal tokens, at any place, and so the
sharing of prefixes is the trace's own. Requests are served in the order of the lines by as many
workers as ``--sessions`` says; the timestamps only have to be there. This module knows no engine.
"""

from collections.abc import Iterator
from os import PathLike, fspath

import msgspec
import numpy as np
import numpy.typing as npt
from attrs import frozen

from kvlease.errors import BadInput, ConfigError, TraceError
from kvlease.protocols.config import SamplingParams
from kvlease.services.sessions import Session, Tokens, Turn

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for."""


class TraceLine(msgspec.Struct, frozen=True, gc=False):
    """One line of a trace, as its file has it."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@frozen
class TraceRequest:
    """One request of a trace, scaled.

    Attributes:
        line: line number in the file, from 1.
        prompt_tokens, output_tokens: lengths after scaling, 1 or more.
        block_tokens: tokens of a block after scaling.
        hash_ids: ids of the blocks that the prompt covers.
    """

    line: int
    prompt_tokens: int
    output_tokens: int
    block_tokens: int
    hash_ids: tuple[int, ...]


def _checked(line: TraceLine, where: str) -> TraceLine:
    if line.input_length < 1:
        raise TraceError(f"{where}: input_length is {line.input_length}; it must be 1 or more")
    if line.output_length < 1:
        raise TraceError(f"{where}: output_length is {line.output_length}; it must be 1 or more")
    needed = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != needed:
        raise TraceError(
            f"{where}: {len(line.hash_ids)} hash_ids for {line.input_length} tokens; "
            f"blocks of {BLOCK_TOKENS} make {needed}"
        )
    if min(line.hash_ids) < 0 or max(line.hash_ids) >= 1 << 63:
        raise TraceError(f"{where}: a hash id is outside 0 .. 2**63 - 1")
    return line


def read_trace(
    path: str | PathLike[str], limit: int | None = None, scale: int = 1
) -> Iterator[TraceRequest]:
    """Yield a trace's requests in order; nothing is read before the first is asked for.

    Args:
        path: the JSONL file.
        limit: stop after so many requests.
        scale: divide all lengths, blocks included, by this divisor of 512.

    Raises:
        ConfigError: limit or scale cannot work.
        BadInput: the file cannot be read.
        TraceError: a line is not of the format; the sentence gives its number.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; give a number of 1 or more")
    if scale < 1 or BLOCK_TOKENS % scale:
        raise ConfigError(f"scale is {scale}; give a divisor of {BLOCK_TOKENS}, such as 8")
    name = fspath(path)
    decoder = msgspec.json.Decoder(TraceLine)
    found = 0
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                try:
                    line = decoder.decode(raw)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise TraceError(f"{name}:{number}: {_first_line(error)}") from error
                yield _scaled(_checked(line, f"{name}:{number}"), number, scale)
                found += 1
                if found == limit:
                    return
    except OSError as error:
        raise BadInput(f"cannot read the trace {name}: {error.strerror or error}") from error
    if not found:
        raise TraceError(f"{name}: the file holds no request")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _scaled(line: TraceLine, number: int, scale: int) -> TraceRequest:
    block = BLOCK_TOKENS // scale
    prompt = max(1, line.input_length // scale)
    return TraceRequest(
        line=number,
        prompt_tokens=prompt,
        output_tokens=max(1, line.output_length // scale),
        block_tokens=block,
        hash_ids=tuple(line.hash_ids[: -(-prompt // block)]),
    )


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatter 64-bit values: the finaliser of SplitMix64."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def prompt_of(request: TraceRequest, vocab_size: int) -> Tokens:
    """Derive a request's tokens from its hash ids.

    A token depends on its block's id and its place in the block alone, so a partial block is the
    beginning of the whole one.

    Shapes: int32 bytes of ``prompt_tokens`` ids, each in 0 .. vocab_size - 1.
    """
    ids = np.asarray(request.hash_ids, dtype=np.uint64)[:, None]
    place = np.arange(request.block_tokens, dtype=np.uint64)[None, :]
    # Multiplication wraps around on purpose; numpy arrays do so without a warning.
    seeds = _mixed(ids + np.uint64(0x9E3779B97F4A7C15)) + place * np.uint64(0x9E3779B97F4A7C15)
    tokens = (_mixed(seeds) % np.uint64(vocab_size)).astype(np.int32)
    return tokens.reshape(-1)[: request.prompt_tokens].tobytes()


def trace_sessions(requests: Iterator[TraceRequest], vocab_size: int) -> Iterator[Session]:
    """Yield one session of one turn for each request; tokens are made when it is asked for."""
    for request in requests:
        sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
        turn = Turn(prompt_of(request, vocab_size), sampling)
        yield Session(f"line {request.line}", (turn,))
