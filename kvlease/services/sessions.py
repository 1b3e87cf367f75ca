"""What a workload is made of: sessions of turns whose prompts grow, as plain data.

A session's first prompt is its opening. The prompt of each later turn is the prompt before it, the
answer to that, and the text the turn adds (a tool's result). This module knows no engine.
"""

from array import array
from collections.abc import Iterable

from attrs import frozen

from kvlease.protocols.config import SamplingParams

Tokens = bytes
"""Token ids as native int32, the form prompts have from the door on."""


def pack(tokens: Iterable[int]) -> Tokens:
    """Turn token ids into int32 bytes."""
    # A list, because an array would take bytes for int32 already.
    return array("i", list(tokens)).tobytes()


def unpack(tokens: Tokens) -> list[int]:
    """Turn int32 bytes back into token ids."""
    return array("i", tokens).tolist()


def num_tokens(tokens: Tokens) -> int:
    """Count the ids in int32 bytes."""
    return len(tokens) // 4


@frozen
class Turn:
    """One request of a session.

    Attributes:
        added: tokens behind the previous prompt and answer; the opening, in the first turn.
        is_whole: ``added`` is the whole prompt, whatever was asked and answered before.
        sampling: how the answer is drawn.
        pause_s: seconds between the previous answer and this request (the tool's run time).
    """

    added: Tokens
    sampling: SamplingParams
    pause_s: float = 0.0
    is_whole: bool = False


@frozen
class Session:
    """Turns that follow each other; ``name`` is what reports and messages call it."""

    name: str
    turns: tuple[Turn, ...]
