"""The race's sessions: tool-calling agents whose prompts no answer changes.

They share a short system prompt that stays on the device; what is evicted and restored is each
session's own history. Sizes are small, so that a whole table takes minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import evolve

from kvlease.services.sessions import Session, Tokens, Turn, pack
from kvlease.services.workload import WorkloadShape, tool_agent_sessions

SHAPE: Final = WorkloadShape(
    turns=3,
    system_tokens=128,
    task_tokens=(128, 192),
    result_tokens=(16, 64),
    answer_tokens=(2, 3),
    pause_s=0.1,
)


def race_sessions(count: int, vocab_size: int, seed: int) -> list[Session]:
    """Return the sessions, their turns to be joined by answers; equal arguments, equal bytes."""
    return list(tool_agent_sessions(count, SHAPE, vocab_size, seed))


def with_answers(session: Session, answers: Sequence[Sequence[int]]) -> Session:
    """Return the session with whole prompts, made from these answers to its turns."""
    history: Tokens = b""
    turns: list[Turn] = []
    for turn, answer in zip(session.turns, answers, strict=True):
        prompt = history + turn.added
        turns.append(evolve(turn, added=prompt, is_whole=True))
        history = prompt + pack(answer)
    return Session(session.name, tuple(turns))
