"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as
easy as 1, 2, 3" (SC 2011): a number is a function of its counter, so no draw depends on the one before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

# Multipliers and key increments of the paper's section 4.3 (as in Random123 and cuRAND).
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: Words, key: Words) -> Words:
    """Ten rounds for each row: counter [n, 4] and key [n, 2] -> [n, 4], all 32-bit words in uint64."""
    c0, c1, c2, c3 = (counter[:, column] for column in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(seeds: Words, choices: Words, output_indices: Words) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each row (seed, choice, output index), arrays [n].

    The key is the seed; the counter is (index low, index high, choice, 0).
    """
    counter = np.stack(
        (output_indices & _LOW, output_indices >> _SHIFT, choices & _LOW, np.zeros_like(choices)), axis=1
    )
    words = philox4x32(counter, np.stack((seeds & _LOW, seeds >> _SHIFT), axis=1))
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    numbers: npt.NDArray[np.float64] = (high.astype(np.float64) * 2.0**26 + low.astype(np.float64)) / 2.0**53
    return numbers
