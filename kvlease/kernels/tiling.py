"""How work is cut so that one row's bits never depend on its neighbours.

A matrix library picks its summation order from the shape of the whole product, so the same row
can come out one bit apart in a batch of 1 and a batch of 7. Cutting every product into tiles of one
fixed shape takes that choice away: each call has the same shape, whatever the batch. This module
knows no model; it only rounds numbers and pads tensors.
"""

from attrs import frozen
from torch import Tensor


@frozen
class Tiling:
    """Fixed tile sizes of a step.

    ``rows`` is how many query rows one product takes, ``keys`` how many keys one attention tile
    takes; 1 means "as many as there are", the fast mode.
    """

    rows: int
    keys: int

    @property
    def is_exact(self) -> bool:
        """Whether products are cut into tiles of one shape."""
        return self.rows > 1

    def round_rows(self, num_rows: int) -> int:
        """Return the padded number of rows, never 0."""
        return round_up(max(num_rows, 1), self.rows)

    def round_keys(self, num_keys: int) -> int:
        """Return the padded number of keys; in exact mode at least one tile.

        A softmax row shorter than a vector register sums in another order than a longer one, so
        even a query that sees no key gets one (masked) tile.
        """
        if not self.is_exact:
            return num_keys
        return round_up(max(num_keys, 1), self.keys)


EXACT = Tiling(rows=32, keys=64)
"""Bits of a row do not depend on the batch, the chunking, or other sequences' lengths."""
FAST = Tiling(rows=1, keys=1)
"""Whatever the matrix library likes best for the shapes at hand."""


def round_up(value: int, step: int) -> int:
    """Return the least multiple of ``step`` that is not below ``value``."""
    return -(-value // step) * step


def pad_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Return rows [N, ...] followed by zeros up to [num_rows, ...]; the same tensor if N fits."""
    if rows.shape[0] == num_rows:
        return rows
    padded = rows.new_zeros((num_rows, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded
