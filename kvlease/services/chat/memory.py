"""Which tokens an answer was made of, so that a conversation's next prompt has the very same.

Text does not tell: a model may spell a word in tokens that no tokenizer would choose. What is found
here by prompt and message is spliced into the next prompt, and its cached pages are found. What is
not found is written and tokenised again: slower by a few pages, never wrong.
"""

import hashlib
import threading
from array import array
from collections import OrderedDict
from typing import final

import msgspec

from kvlease.services.chat.messages import AssistantMessage

MAX_BYTES = 64 << 20
"""What a memory may hold; a million answers of 16 tokens."""
_OVERHEAD = 200
"""Bytes of an entry beside its tokens."""


@final
class PrefixHash:
    """The hash of a prompt so far, within one tenant."""

    def __init__(self, salt: bytes) -> None:
        """Start an empty prompt; ``salt`` keeps tenants apart."""
        self._hash = hashlib.blake2b(salt, digest_size=16, person=b"kvlease answers")

    def add(self, tokens: list[int]) -> None:
        """Go on by these tokens."""
        self._hash.update(array("i", tokens).tobytes())

    def then(self, tokens: list[int]) -> "PrefixHash":
        """Return the hash of the prompt so far and these tokens."""
        other = PrefixHash(b"")
        other._hash = self._hash.copy()
        other.add(tokens)
        return other

    def key(self, message: AssistantMessage) -> bytes:
        """Return the key of an answer to the prompt so far, by what its client keeps of it."""
        calls = [(call.name, call.arguments) for call in message.calls]
        hashed = self._hash.copy()
        hashed.update(b"answer" + msgspec.json.encode((message.text, calls)))
        return hashed.digest()


@final
class AnswerMemory:
    """Answers' tokens by key; the longest unused go first. Any thread may ask."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Start empty."""
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._answers: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: bytes, tokens: list[int]) -> None:
        """Keep an answer's tokens, in place of older ones of the same key."""
        with self._lock:
            self._forget(self._answers.pop(key, None))
            self._answers[key] = array("i", tokens)
            self._nbytes += 4 * len(tokens) + _OVERHEAD
            while self._nbytes > self._max_bytes:
                self._forget(self._answers.popitem(last=False)[1])

    def _forget(self, tokens: "array[int] | None") -> None:
        if tokens is not None:
            self._nbytes -= 4 * len(tokens) + _OVERHEAD

    def get(self, key: bytes) -> list[int] | None:
        """Return the tokens of an answer, if they are still known."""
        with self._lock:
            found = self._answers.get(key)
            if found is None:
                return None
            self._answers.move_to_end(key)
        return found.tolist()
