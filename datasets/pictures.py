"""Pictures from outside a data set, made as its own images are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from datasets.registry import find


def as_in(data: str, pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures uint8 ``[n, H, W]`` or ``[n, H, W, 3]`` as the data set's own images are.

    For drawings, bright paper (the median of a picture's pixels) means dark ink, and the two are
    swapped: a scan is learned from as Omniglot's files are.
    """
    if not find(data).ink:
        return pictures
    bright = np.median(pictures.reshape(len(pictures), -1), axis=1) > 127
    return np.where(bright.reshape(-1, *[1] * (pictures.ndim - 1)), 255 - pictures, pictures)
