"""Text to token ids and back, control tokens apart: what a client writes never becomes one.

A control token is named by its spelling. Where a vocabulary has no such token the spelling is
ordinary text. This module knows no chat format.
"""

import importlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Protocol, cast, final

import msgspec

from kvlease.errors import BadInput
from kvlease.kernels.models.tokenizer import ASSISTANT, BOS, EOS, NUM_BYTES, USER, VOCAB_SIZE

_HIDDEN = re.compile("<\uff5c.*\uff5c>", re.DOTALL)
"""Spelling of DeepSeek's control tokens that are no part of an answer's text."""


class Vocabulary(Protocol):
    """The tokens of one model."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in which nothing is a control token."""
        ...

    def control(self, spelling: str) -> list[int]:
        """Return the control token of that spelling, or its spelling as text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return what a token adds to an answer's text, in UTF-8; a part of a character maybe."""
        ...


@final
class ByteVocabulary:
    """The embedded model's bytes and markers.

    Tokens above them, which only a model without arithmetic has, are written as numbers.
    """

    def __init__(self, bos: str, eos: str, user: str, assistant: str) -> None:
        """Say how the format spells what the markers stand for."""
        self._controls = {bos: BOS, eos: EOS, user: USER, assistant: ASSISTANT}

    def encode(self, text: str) -> list[int]:
        """Return the text's bytes."""
        return list(text.encode())

    def control(self, spelling: str) -> list[int]:
        """Return a marker, or the spelling's bytes."""
        found = self._controls.get(spelling)
        return self.encode(spelling) if found is None else [found]

    def token_bytes(self, token: int) -> bytes:
        """Return the byte; nothing for a marker."""
        if token < NUM_BYTES:
            return bytes([token])
        return b"" if token < VOCAB_SIZE else b" %d" % token


class _Encoding(Protocol):
    ids: list[int]


class _FastTokenizer(Protocol):
    """The part used of the package ``tokenizers``."""

    def encode(self, text: str, *, add_special_tokens: bool) -> _Encoding:
        """Encode a text."""
        ...

    def id_to_token(self, id: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        ...


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The part used of a ``tokenizer.json``."""

    model: dict[str, object]
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, object] | None = None


@cache
def _byte_letters() -> dict[str, int]:
    """Map the letters in which byte-level vocabularies spell bytes to those bytes.

    Printable bytes stand for themselves; the others are the letters from U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


def _is_byte_level(decoder: dict[str, object] | None) -> bool:
    return decoder is not None and '"ByteLevel"' in json.dumps(decoder)


@final
class CheckpointVocabulary:
    """A byte-level ``tokenizer.json``, read through the package ``tokenizers``."""

    def __init__(self, path: Path) -> None:
        """Read the file; raises BadInput in one sentence."""
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError as error:
            raise BadInput(
                "text for a checkpoint needs the package tokenizers (extra `text`); install it"
            ) from error
        try:
            raw = path.read_bytes()
            file = msgspec.json.decode(raw, type=_TokenizerFile)
            # Without its added tokens a tokenizer cannot find a control token in a client's text.
            plain = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            plain["added_tokens"] = msgspec.Raw(b"[]")
            text = msgspec.json.encode(plain).decode()
            self._plain = cast("_FastTokenizer", tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the package raises bare exceptions about the file's content
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInput(f"cannot read {path}: {reason}") from error
        if not _is_byte_level(file.decoder):
            raise BadInput(f"{path} is no byte-level tokenizer; answers cannot be streamed from it")
        self._controls = {token.content: token.id for token in file.added_tokens}
        self._bytes = {
            token.id: b""
            if token.special or _HIDDEN.fullmatch(token.content)
            else token.content.encode()
            for token in file.added_tokens
        }

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def control(self, spelling: str) -> list[int]:
        """Return the added token of that spelling, or the ids of the spelling as text."""
        found = self._controls.get(spelling)
        return self.encode(spelling) if found is None else [found]

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes; none for control tokens, or ids that nobody has."""
        found = self._bytes.get(token)
        if found is None:
            letters = _byte_letters()
            spelled = self._plain.id_to_token(token) or ""
            found = self._bytes[token] = bytes(letters[c] for c in spelled if c in letters)
        return found
