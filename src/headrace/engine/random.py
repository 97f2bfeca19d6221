"""Random numbers without state: a pure function of (seed, position), so no batch, worker or restart changes them.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3): ten rounds that mix
a 128-bit counter under a 64-bit key. The key is the seed, the counter is the position. A row of tokens gets two of the
words, and each token a hash of its id with them, which costs a fraction of a Philox call for each.
"""

import numpy as np
import numpy.typing as npt
import torch

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MASK = 0xFFFFFFFF

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


def row_keys(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Two random words for each (seed, position) ``[n, 2]``, in int32 because torch hardly knows unsigned ones."""
    seed = seeds.astype(np.uint64)
    position = positions.astype(np.uint64)
    zero = np.zeros_like(position)
    words = philox4x32(
        np.stack([position & _LOW, position >> _SHIFT, zero, zero]), np.stack([seed & _LOW, seed >> _SHIFT])
    )
    keys: npt.NDArray[np.int32] = np.ascontiguousarray(words[:2].T).astype(np.uint32).view(np.int32)
    return keys


def token_bits(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """A hash of every token's id under each row's ``keys [n, 2] int32``: 32 bits in ``[n, vocab] int64``.

    Two rounds of MurmurHash3's 32-bit finaliser, one key word before each. Under one key no two tokens' bits are equal.
    """
    words = keys.long() & _MASK
    bits = torch.arange(vocab, device=keys.device) * 0x9E3779B9 & _MASK
    for word in words.unbind(1):
        bits = bits ^ word[:, None]
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits ^= bits >> shift
            # The product may wrap around at 64 bits, which leaves its lower 32 right.
            bits *= factor
            bits &= _MASK
        bits ^= bits >> 16
    return bits


def log_exponentials(bits: torch.Tensor) -> torch.Tensor:
    """ln of the exponential numbers ``-ln(1 - u)`` at ``u = (bits + ½) / 2^32``, float64: from -22.9 to 3.2."""
    return bits.double().add_(0.5).mul_(-(2.0**-32)).log1p_().neg_().log_()
