"""Random numbers without state: a pure function of (seed, position), so no batch, worker or restart changes them.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3): ten rounds that mix
a 128-bit counter under a 64-bit key. The key is the seed, the counter is the position.
"""

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Words = npt.NDArray[np.uint64]
"""32-bit words, each in a uint64 so that products do not overflow."""


def philox4x32(counter: Words, key: Words) -> Words:
    """The four output words ``[4, n]`` for counters ``[4, n]`` under keys ``[2, n]``."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = c0 * _MULTIPLIERS[0]
        right = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position) ``[n]``, with 53 random bits."""
    seed = seeds.astype(np.uint64)
    position = positions.astype(np.uint64)
    zero = np.zeros_like(position)
    words = philox4x32(
        np.stack([position & _LOW, position >> _SHIFT, zero, zero]), np.stack([seed & _LOW, seed >> _SHIFT])
    )
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    unit: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return unit
