"""Randomness without state: every random number has an address.

An address is (seed, split, purpose, index). It is hashed to a 64-bit key, and the key is the state
of a splitmix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014) whose ``j``-th output is computed directly from ``j``. So a draw depends only on its address.

The streams of ``numpy.random`` and ``torch`` may change between releases. A task set must not.
Every operation is exact integer arithmetic or a single correctly rounded IEEE operation, so every
machine computes the same bits.
"""

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

Keys = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = (np.uint64(shift) for shift in (30, 27, 31, 11))


def _mix(z: Keys) -> Keys:
    """Apply splitmix64's finaliser, a bijection of uint64, in place; numpy scalars would warn."""
    z ^= z >> _S30
    z *= _MIX_1
    z ^= z >> _S27
    z *= _MIX_2
    z ^= z >> _S31
    return z


def keys(seed: int, split: str, purpose: str, index: ArrayLike) -> Keys:
    """Return the keys at (seed, split, purpose, index): int64 ``[...]`` to uint64 ``[...]``.

    A scalar gives ``[1]``. BLAKE2b hashes the strings, because ``hash`` differs between processes.
    """
    # The length of the split keeps ("ab", "c") and ("a", "bc") apart.
    text = f"{int(seed)}|{len(split)}|{split}|{purpose}".encode()
    base = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    where = np.atleast_1d(np.asarray(index, dtype=np.int64)).astype(np.uint64)
    return _mix(where * _GOLDEN + np.uint64(base))


def derive(keys: Keys, n: int) -> Keys:
    """Return ``n`` child keys of each key (its stream): uint64 ``[...]`` to ``[..., n]``."""
    steps = np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN
    return _mix(keys[..., None] + steps)


def uniforms(keys: Keys, n: int) -> NDArray[np.float64]:
    """Return ``n`` uniforms in [0, 1) for each key: uint64 ``[...]`` to float64 ``[..., n]``."""
    return (derive(keys, n) >> _S11).astype(np.float64) * 2.0**-53


def choose(keys: Keys, n: ArrayLike, k: int) -> NDArray[np.int64]:
    """Draw ``k`` distinct integers in [0, n) for each key; all ordered choices are equally likely.

    Keys uint64 ``[...]`` give int64 ``[..., k]``. ``n`` is one number, or one for each key (int64
    ``[...]``). Floyd's algorithm (Bentley and Floyd, "A sample of brilliance", 1987) draws the set;
    a second draw gives the random order. Raise ``ValueError`` if ``k`` is greater than an ``n``.
    """
    of = np.asarray(n, dtype=np.int64)
    if k < 0 or (of < k).any():
        raise ValueError(f"cannot choose {k} of {of.min()} without replacement")
    draws = uniforms(keys, 2 * k)
    tops = of[..., None] + np.arange(-k, 0, dtype=np.int64)
    candidates = (draws[..., :k] * (tops + 1)).astype(np.int64)
    chosen = candidates.copy()
    for i in range(1, k):
        candidate = candidates[..., i]
        taken = (chosen[..., :i] == candidate[..., None]).any(axis=-1)
        chosen[..., i] = np.where(taken, tops[..., i], candidate)
    order = np.argsort(draws[..., k:], axis=-1, kind="stable")
    return np.take_along_axis(chosen, order, axis=-1)


def permutation(keys: Keys, n: int) -> NDArray[np.int64]:
    """Return a random order of [0, n) for each key: uint64 ``[...]`` to int64 ``[..., n]``."""
    return np.argsort(derive(keys, n), axis=-1, kind="stable").astype(np.int64)
