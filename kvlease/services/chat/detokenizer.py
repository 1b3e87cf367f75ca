"""Tokens to text as they come: a character that is not whole yet waits for its other bytes."""

import codecs
from typing import final

from kvlease.services.chat.vocabulary import Vocabulary

_decoder = codecs.getincrementaldecoder("utf-8")


@final
class Detokenizer:
    """Turns one answer's tokens into text; what is no UTF-8 is replaced, as ``decode`` would."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Borrows the vocabulary."""
        self._vocabulary = vocabulary
        self._decoder = _decoder(errors="replace")

    def feed(self, token: int) -> str:
        """Return the text that a token completes; may be empty."""
        return self._decoder.decode(self._vocabulary.token_bytes(token))

    def finish(self) -> str:
        """Return what stands for the character that the answer's end cut off, if it did."""
        return self._decoder.decode(b"", final=True)
