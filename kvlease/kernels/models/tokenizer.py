"""The embedded model's tokenizer: one token a byte, and a few markers above them.

Knows no chat format; it only names the markers.
"""

from collections.abc import Iterable
from typing import final

NUM_BYTES = 256
BOS, EOS, PAD, USER, ASSISTANT, TOOL, CALL_BEGIN, CALL_END = range(NUM_BYTES, NUM_BYTES + 8)
SPECIAL_TOKENS: dict[str, int] = {
    "<bos>": BOS,
    "<eos>": EOS,
    "<pad>": PAD,
    "<user>": USER,
    "<assistant>": ASSISTANT,
    "<tool>": TOOL,
    "<call>": CALL_BEGIN,
    "</call>": CALL_END,
}
"""Markers by their spelling; text is never scanned for them, only token ids name them."""
VOCAB_SIZE = 264


@final
class ByteTokenizer:
    """UTF-8 bytes as tokens 0 .. 255; markers from 256 on."""

    vocab_size = VOCAB_SIZE
    eos_token = EOS

    def encode(self, text: str) -> list[int]:
        """Return the text's UTF-8 bytes; no marker is added."""
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of the bytes among ``tokens``, without markers; bad UTF-8 is replaced."""
        return bytes(token for token in tokens if 0 <= token < NUM_BYTES).decode(errors="replace")
