"""Speed of the prefix index on long conversations, and its hit rates on a public trace.

Run from the checkout: ``python benchmarks/prefix_index.py``. The trace (Mooncake's
conversation trace) is read from ``../shared/data`` beside the checkout; without it that part says
so and is left out. Every figure is a median with its quartiles; memory comparison alone is printed
beside each match, since it is the floor.
"""

import argparse
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from kvlease.pools.prefix_index import Policy, PrefixIndex  # noqa: E402  (run from a checkout)

TRACE = CHECKOUT.parent / "shared" / "data" / "mooncake_conversation_trace.jsonl"
PAGE_TOKENS = 256
PAGE_BYTES = 4 * PAGE_TOKENS
TRACE_PAGE_TOKENS = 512
IDENTITY = b"benchmark"
EXPECTED_HITS = {("lru", 10_000): 21.5, ("lru", 50_000): 36.0}


def timed(action: Callable[[], object], times: int) -> list[float]:
    """Run an action and return the microseconds of each run, sorted."""
    samples: list[float] = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        samples.append(1e6 * (time.perf_counter() - start))
    return sorted(samples)


def show(name: str, samples: list[float], floor: float | None = None) -> None:
    low, middle, high = statistics.quantiles(samples, n=4)
    p99 = samples[int(0.99 * (len(samples) - 1))]
    ratio = "" if floor is None else f"   {middle / floor:4.2f} x memory comparison"
    print(f"  {name:<44} {middle:8.1f} us  ({low:.1f} .. {high:.1f}, p99 {p99:.1f}){ratio}")


class Conversations:
    """A 128K-token base and 20 turns of 640 or 768 tokens, each turn with a sibling branch."""

    def __init__(self, base_tokens: int, turns: int) -> None:
        """Serve the base and then turn after turn."""
        self.index = PrefixIndex(PAGE_BYTES, needs_tail=True)
        self.random = np.random.default_rng(7)
        self.given = 0
        self.prompt = self.tokens(base_tokens)
        if base_tokens:
            self.serve(self.prompt)
        for turn in range(turns):
            # Without a sibling the edges would be joined and the path would be one edge.
            self.serve(self.prompt + self.tokens(PAGE_TOKENS))
            whole = len(self.prompt) // PAGE_BYTES * PAGE_BYTES
            self.prompt = self.prompt[:whole] + self.tokens(640 + turn % 2 * 128)
            self.serve(self.prompt)

    def tokens(self, count: int) -> bytes:
        """Draw new tokens."""
        return self.random.integers(0, 150_000, count, dtype=np.int32).tobytes()

    def pages(self, count: int) -> "array[int]":
        """Name new pages."""
        self.given += count
        return array("i", range(self.given - count, self.given))

    def serve(self, prompt: bytes) -> None:
        """Match, add what is new, keep a tail now and then and at the end, release."""
        match = self.index.match(IDENTITY, prompt, len(prompt) // PAGE_BYTES)
        count = len(prompt) // PAGE_BYTES - match.num_pages
        tokens = prompt[: (match.num_pages + count) * PAGE_BYTES]
        self.index.extend(match.cursor, tokens, self.pages(count))
        first, last = match.num_pages, match.cursor.num_pages
        for boundary in [*range(first // 64 * 64 + 64, last, 64), last]:
            self.given += 1
            self.index.put_tail(match.cursor, boundary, self.given)
        self.index.release(match.cursor)


def time_matches(times: int) -> None:
    work = Conversations(128 * 1024, 20)
    index, prompt = work.index, work.prompt
    limit = (len(prompt) // 4 - 1) // PAGE_TOKENS
    copy = bytes(bytearray(prompt))
    floor_samples = timed(lambda: prompt.startswith(copy), times)
    floor = statistics.median(floor_samples)
    last_page = len(prompt) // PAGE_BYTES * PAGE_BYTES - PAGE_BYTES // 2
    diverging = prompt[:last_page] + work.tokens(PAGE_TOKENS)
    inside_base = prompt[: 511 * PAGE_BYTES + 64] + work.tokens(2 * PAGE_TOKENS)

    def match_of(tokens: bytes) -> tuple[list[float], list[float]]:
        matches: list[float] = []
        releases: list[float] = []
        for _ in range(times):
            start = time.perf_counter()
            match = index.match(IDENTITY, tokens, limit)
            middle = time.perf_counter()
            index.release(match.cursor)
            releases.append(1e6 * (time.perf_counter() - middle))
            matches.append(1e6 * (middle - start))
        return sorted(matches), sorted(releases)

    print(
        f"match: {len(prompt) // 4} tokens, pages of {PAGE_TOKENS}, base and 20 turns,"
        f" {index.statistics().num_nodes} edges in the tree"
    )
    show("memory comparison of the prompt alone", floor_samples)
    full, release = match_of(prompt)
    show("full hit, with page ids, tail and pins", full, floor)
    show("  its release", release)
    show("divergence inside the last page", match_of(diverging)[0], floor)
    show("divergence in the base's last page", match_of(inside_base)[0], floor)
    work.serve(inside_base)
    show("full hit after a split of the base", match_of(prompt)[0], floor)


def time_changes(times: int) -> None:
    """Insert and evict, on trees of their own."""
    inserts: list[float] = []
    steps: list[float] = []
    evictions: list[float] = []
    singles: list[float] = []
    for _ in range(max(3, times // 40)):
        work = Conversations(0, 0)
        prompt = work.tokens(128 * 1024)
        pages = work.pages(512)
        cursor = work.index.match(IDENTITY, prompt, 512).cursor
        inserts += timed(lambda: work.index.extend(cursor, prompt, pages), 1)  # noqa: B023
        for _ in range(20):
            more, page = work.tokens(PAGE_TOKENS), work.pages(1)
            steps += timed(lambda: work.index.extend(cursor, more, page), 1)  # noqa: B023
        work.index.release(cursor)
        singles += timed(lambda: work.index.evict_device(1), 20)  # noqa: B023
        evictions += timed(lambda: work.index.evict_device(512), 1)  # noqa: B023
    print("insert and evict: 512 pages")
    show("insert 128K tokens", sorted(inserts))
    show("add one sealed page to a 128K edge", sorted(steps))
    show("evict one page of a 128K edge", sorted(singles))
    show("evict 512 pages", sorted(evictions))


def trace_requests() -> list[tuple[bytes, int, int]]:
    """Read prompts as bytes of whole blocks, with their lengths and output lengths in tokens."""
    requests: list[tuple[bytes, int, int]] = []
    positions = np.arange(TRACE_PAGE_TOKENS, dtype=np.int32)
    with TRACE.open() as lines:
        for line in lines:
            entry = json.loads(line)
            blocks = np.asarray(entry["hash_ids"], dtype=np.int32)
            # A block's tokens carry its id, so that equal tokens mean equal blocks.
            tokens = blocks[:, None] * 997 + positions[None, :] + (blocks[:, None] << 9)
            whole = tokens.astype(np.int32).tobytes()[: 4 * entry["input_length"]]
            requests.append((whole, entry["input_length"], entry["output_length"]))
    return requests


def replay(
    requests: list[tuple[bytes, int, int]], policy: Policy, capacity: int
) -> tuple[float, list[float], list[float]]:
    """Drive a trace through an index of `capacity` device pages.

    Returns the share of prompt tokens hit, in percent, and microseconds of each match and of each
    insert with its evictions.
    """
    index = PrefixIndex(4 * TRACE_PAGE_TOKENS, needs_tail=True, policy=policy)
    free = list(range(capacity))
    slots = list(range(capacity + 1))
    outputs = np.random.default_rng(11)
    hit = total = 0
    matches: list[float] = []
    inserts: list[float] = []
    for prompt, length, output_length in requests:
        generated = outputs.integers(-(2**31), 0, output_length, dtype=np.int32).tobytes()
        tokens = prompt + generated
        start = time.perf_counter()
        match = index.match(IDENTITY, tokens, (length - 1) // TRACE_PAGE_TOKENS)
        middle = time.perf_counter()
        count = (length + output_length) // TRACE_PAGE_TOKENS - match.num_pages
        if count > len(free):
            released = index.evict_device(count - len(free))
            free.extend(released.device_pages)
            slots.extend(released.device_tails)
        pages = array("i", [free.pop() for _ in range(count)])
        end = (match.num_pages + count) * 4 * TRACE_PAGE_TOKENS
        extended = index.extend(match.cursor, tokens[:end], pages)
        free.extend(extended.not_taken)
        for boundary in range(match.num_pages + 1, match.cursor.num_pages + 1):
            unused = index.put_tail(match.cursor, boundary, slots.pop()).unused
            if unused is not None:
                slots.append(unused)
        index.release(match.cursor)
        inserts.append(1e6 * (time.perf_counter() - middle))
        matches.append(1e6 * (middle - start))
        hit += match.num_pages * TRACE_PAGE_TOKENS
        total += length
    index.check()
    assert len(free) + index.statistics().device_pages == capacity, "a page was lost"
    return 100 * hit / total, sorted(matches), sorted(inserts)


def replay_trace(limit: int | None, capacities: list[int]) -> bool:
    """Print hit rates; return whether the expected ones were reached."""
    if not TRACE.exists():
        print("trace: ../shared/data/mooncake_conversation_trace.jsonl is missing; skipped")
        return True
    requests = trace_requests()[:limit]
    print(f"trace: {len(requests)} requests, pages of {TRACE_PAGE_TOKENS}, outputs kept too")
    is_reached = True
    policies: tuple[Policy, Policy] = ("lru", "s3fifo")
    for capacity in capacities:
        for policy in policies:
            share, matches, inserts = replay(requests, policy, capacity)
            expected = EXPECTED_HITS.get((policy, capacity)) if limit is None else None
            note = "" if expected is None else f"   (at least {expected} % expected)"
            print(f"  {policy:<6} {capacity:>6} pages: {share:5.2f} % of prompt tokens hit{note}")
            show("  match", matches)
            show("  evict, insert, keep tails, release", inserts)
            is_reached = is_reached and (expected is None or share >= expected)
    return is_reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=400, help="runs of each timed call")
    parser.add_argument("--limit", type=int, help="only the first requests of the trace")
    parser.add_argument(
        "--capacities", type=int, nargs="+", default=[1_000, 5_000, 10_000, 30_000, 50_000]
    )
    options = parser.parse_args()
    time_matches(options.times)
    time_changes(options.times)
    return 0 if replay_trace(options.limit, options.capacities) else 1


if __name__ == "__main__":
    sys.exit(main())
