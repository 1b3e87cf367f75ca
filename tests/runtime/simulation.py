"""An independent simulation of the prefix cache, written from its definition.

One request at a time, one tier, a tail at every boundary. A request matches the leading full pages
that are cached, never its last token; it stamps every page on its path with its number; room is
made by dropping the leaf with the oldest stamp that is not on the path; pages computed stay cached,
those of the answer too. No code of kvlease is used here.
"""

import heapq
from collections.abc import Callable, Iterator


class Simulation:
    """Pages as a plain tree: key of a page = (key of its parent, its tokens)."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.capacity = num_pages
        self.page_tokens = page_tokens
        self.parent: dict[int, int] = {}
        self.children: dict[int, int] = {}
        self.stamp: dict[int, int] = {}
        self.leaves: list[tuple[int, int]] = []
        self.clock = 0

    def _keys(self, tokens: bytes) -> Iterator[int]:
        key, size = 0, 4 * self.page_tokens
        for start in range(0, len(tokens) - size + 1, size):
            key = hash((key, tokens[start : start + size]))
            yield key

    def _evict_to(self, room: int, path: set[int]) -> None:
        kept = []
        while len(self.stamp) > room:
            stamp, key = heapq.heappop(self.leaves)
            if self.stamp.get(key) != stamp or self.children.get(key, 0):
                continue
            if key in path:
                kept.append((stamp, key))
                continue
            del self.stamp[key]
            parent = self.parent.pop(key)
            if parent:
                self.children[parent] -= 1
                if not self.children[parent]:
                    heapq.heappush(self.leaves, (self.stamp[parent], parent))
        for entry in kept:
            heapq.heappush(self.leaves, entry)

    def serve(self, prompt: bytes, output: Callable[[bytes], bytes], num_output: int) -> int:
        """Serve one request; return how many of its prompt tokens were cached."""
        self.clock += 1
        num_prompt = len(prompt) // 4
        hit: list[int] = []
        for key in self._keys(prompt[: 4 * (num_prompt - 1)]):
            if key not in self.stamp:
                break
            hit.append(key)
        path = set(hit)
        for key in hit:
            self._touch(key)
        # All pages but those of the path must leave room for the whole sequence.
        whole = prompt + output(prompt)
        computed = num_prompt + num_output - 1
        in_use = -(-computed // self.page_tokens)
        self._evict_to(self.capacity - in_use + len(hit), path)
        previous = 0
        for key in self._keys(whole[: 4 * computed]):
            if key not in self.stamp:
                self.parent[key] = previous
                if previous:
                    self.children[previous] = self.children.get(previous, 0) + 1
            self._touch(key)
            previous = key
        return len(hit) * self.page_tokens

    def _touch(self, key: int) -> None:
        self.stamp[key] = self.clock
        heapq.heappush(self.leaves, (self.clock, key))
