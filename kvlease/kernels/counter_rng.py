"""Random numbers that are a pure function of (seed, position): no state, no order, no batch.

Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return four 32-bit words per row.

    Shapes: counters [N, 4] and keys [N, 2], each entry below 2**32; result [N, 4] likewise.
    """
    c0, c1, c2, c3 = counters.T
    k0, k1 = keys.T
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _WORD) ^ c1 ^ k0,
            second & _LOW,
            (first >> _WORD) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits per (seed, position).

    Seeds are taken modulo 2**64, so negative ones work.
    """
    mask = (1 << 64) - 1
    keys = np.array([seed & mask for seed in seeds], dtype=np.uint64)
    counts = np.array(positions, dtype=np.uint64)
    zeros = np.zeros_like(counts)
    words = philox(
        np.stack([counts & _LOW, counts >> _WORD, zeros, zeros], axis=1),
        np.stack([keys & _LOW, keys >> _WORD], axis=1),
    )
    bits = ((words[:, 0] << _WORD) | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
