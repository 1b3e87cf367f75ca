"""Two prompts that share a long beginning, answered at the same time by an embedded engine.

Run it with ``python examples/stream_answers.py``. The second round finds the shared beginning and
each prompt's own history in the cache; the usage of each answer says where its tokens came from.
"""

import trio

import kvlease

SHARED = list(b"You are a careful engineer. Answer in one line.\n" * 8)
QUESTIONS = (b"What is a lease?", b"What is an epoch?")


async def answer(engine: kvlease.Engine, prompt: list[int], name: str) -> list[int]:
    """Stream one answer and print how much of its prompt was cached."""
    sampling = kvlease.SamplingParams(max_tokens=16, ignore_eos=True)
    async with engine.generate(prompt, sampling) as stream:
        tokens = [event.token async for event in stream]
        usage = stream.result.usage
    cached = usage.hit_device + usage.hit_host
    print(f"{name}: {len(tokens)} tokens; {cached} of {usage.prompt} prompt tokens were cached")
    return tokens


async def main() -> None:
    """Open the engine for a block, ask twice, and leave; the engine ends with the block."""
    config = kvlease.EngineConfig(device_pages=128, host_pages=512, max_sessions=4)
    async with kvlease.open_engine(None, config) as engine:
        for turn in ("first", "second"):
            async with trio.open_nursery() as nursery:
                for number, question in enumerate(QUESTIONS, 1):
                    prompt = SHARED + list(question)
                    nursery.start_soon(answer, engine, prompt, f"{turn} round, prompt {number}")


if __name__ == "__main__":
    trio.run(main)
