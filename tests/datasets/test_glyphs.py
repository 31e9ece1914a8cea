"""Glyphs are the same bits everywhere."""

import hashlib

import numpy as np

from datasets import glyphs


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def test_golden_bits():
    """On a new machine, a failure means an inexact operation; after a change, raise VERSION."""
    assert sha256(glyphs.draw("test", np.arange(5))) == (
        "89705df57b522b9df02d715d309c00be0c2aa70dc74646b936021add72d0f14c"
    )
    assert sha256(glyphs.draw("train", np.array([0, 799]))) == (
        "9c17e619a9b20c6ba65d8fb50bbfb80b4c6cf712ae496ccaea3bb5a0825fb622"
    )
    assert glyphs.VERSION == 1
    together = glyphs.draw("train", np.arange(30))
    assert (glyphs.draw("train", np.array([29, 3])) == together[[29, 3]]).all()
