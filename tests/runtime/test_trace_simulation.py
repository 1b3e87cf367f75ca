"""Hits of a whole trace equal an independent simulation, request by request.

In the suite 2,000 requests of the public trace with lengths divided by 16 and pages of 256 tokens;
the whole trace, undivided, with pages of 512 tokens as a command (some 20 minutes):
``pytest -s tests/runtime/test_trace_simulation.py --full``.
"""

from array import array
from pathlib import Path

import pytest

from kvlease.kernels.models.null_model import VOCAB_SIZE, next_token
from kvlease.protocols.config import EngineConfig, SamplingParams
from kvlease.runtime.engine import open_engine
from kvlease.services.trace import read_trace, trace_sessions
from tests.runtime.simulation import Simulation

TRACE = Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation_trace.jsonl"


def answer_of(num_output: int) -> "object":
    def output(prompt: bytes) -> bytes:
        token = int.from_bytes(prompt[-4:], "little")
        position = len(prompt) // 4 - 1
        drawn = array("i")
        for _ in range(num_output):
            token = next_token(token, position)
            position += 1
            drawn.append(token)
        return drawn.tobytes()

    return output


@pytest.mark.slow
@pytest.mark.parametrize("is_roomy", [False, True])
async def test_hits_equal_the_simulation(is_roomy: bool, is_full: bool) -> None:
    """If one request differs, the index matches, stamps or evicts otherwise than defined."""
    if not TRACE.exists():
        pytest.skip("the public trace is not beside the checkout")
    limit, scale, page_tokens = (None, 1, 512) if is_full else (2000, 16, 256)
    small, large = (10_000, 50_000) if is_full else (400, 1_500)
    num_pages = large if is_roomy else small
    simulation = Simulation(num_pages, page_tokens)
    config = EngineConfig(
        compute="none",
        page_tokens=page_tokens,
        device_pages=num_pages,
        host_pages=0,
        tail_every=1,
        max_sessions=1,
    )
    requests = read_trace(TRACE, limit, scale)
    hits = prompts = 0
    async with open_engine(None, config) as engine:
        for session in trace_sessions(requests, VOCAB_SIZE):
            turn = session.turns[0]
            num_output = turn.sampling.max_tokens
            expected = simulation.serve(turn.added, answer_of(num_output), num_output)  # type: ignore[arg-type]
            params = SamplingParams(max_tokens=num_output, ignore_eos=True)
            async with engine.generate(turn.added, params) as stream:
                result = await stream.drain()
            assert result.usage.hit_device == expected, session.name
            hits += expected
            prompts += result.usage.prompt
        assert engine.statistics().ledger_ok
    print(f"{num_pages} pages: {100 * hits / prompts:.2f} % of {prompts:,} prompt tokens hit")
