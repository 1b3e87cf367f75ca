"""What models without a transformer's arithmetic share: rows of one byte, and no end token.

The null model serves cache studies, the witness model serves tests of schedules. This module does
not know what they do with the rows.
"""

from kvlease.protocols.geometries import V4Geometry, deepseek_v4_schema, one_byte_rows
from kvlease.protocols.schema import Schema


class OneByteModel:
    """The part of a `ModelRunner` that says what it is; ``forward`` is the subclass's."""

    def __init__(
        self, name: str, geometry: V4Geometry, page_tokens: int, *, vocab_size: int, positions: int
    ) -> None:
        """Raises ConfigError when the ratios do not divide ``page_tokens``."""
        self._name = name
        self._schema = one_byte_rows(deepseek_v4_schema(geometry, page_tokens, "float32"))
        self._vocab_size = vocab_size
        self._positions = positions

    @property
    def schema(self) -> Schema:
        """Every component of a small DeepSeek-V4, one byte a row."""
        return self._schema

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1."""
        return self._vocab_size

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens."""
        return self._positions

    @property
    def eos_tokens(self) -> frozenset[int]:
        """No token ends an answer."""
        return frozenset()

    @property
    def fingerprint(self) -> str:
        """Constant: there are no weights."""
        return self._name
