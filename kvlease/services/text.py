"""Turn text into tokens and back, for the models that have a way to.

The embedded model's tokens are bytes. A checkpoint's text needs its ``tokenizer.json`` and the
optional package ``tokenizers``; without them its prompts are given as tokens. This module knows no
chat format.
"""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, cast

from kvlease.errors import BadInput


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Return the text's token ids, markers of a chat format left out."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the tokens' text; what is no text is replaced or left out."""
        ...


class _Encoding(Protocol):
    """The part used of what the package ``tokenizers`` returns."""

    ids: list[int]


class _FastTokenizer(Protocol):
    """The part used of the package ``tokenizers``."""

    def encode(self, text: str, *, add_special_tokens: bool) -> _Encoding:
        """Encode a text."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Decode token ids."""
        ...


class _CheckpointTokenizer:
    def __init__(self, inner: _FastTokenizer) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int]) -> str:
        return self._inner.decode(list(tokens))


def tokenizer_for(model: str | None) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder, or of the embedded model.

    Raises:
        BadInput: the folder has no usable tokenizer, or the package that reads it is missing.
    """
    if model is None:
        from kvlease.kernels.models.tokenizer import ByteTokenizer

        return ByteTokenizer()
    path = Path(model) / "tokenizer.json"
    if not path.is_file():
        raise BadInput(f"{model} has no tokenizer.json; give the prompt with --tokens-file")
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise BadInput(
            "text for a checkpoint needs the package tokenizers (extra `text`); "
            "install it or give the prompt with --tokens-file"
        ) from error
    try:
        inner = cast("_FastTokenizer", tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the package raises bare exceptions about the file's content
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"cannot read {path}: {reason}") from error
    return _CheckpointTokenizer(inner)
