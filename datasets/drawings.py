"""Characters as ordinary classification: new drawings of known classes, not new classes.

The classes are the first ``--ways`` of the few-shot training split. Of each class's 20 drawings 14
are learned from, 2 validate and 4 test. Drawings have no order but that of who drew them (in
Omniglot one person drew the same place of every class of an alphabet), so the division is by place:
the test's are of hands that were never seen. Nothing is rotated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datasets.batches import Examples
from datasets.errors import DataError

PLACES: dict[str, range] = {
    "train": range(0, 14),
    "validation": range(14, 16),
    "test": range(16, 20),
}


def open_glyphs(split: str, *, ways: int, **_unused: object) -> Examples:
    """``ways`` classes of glyphs. Raises :class:`DataError` as :func:`divide` does."""
    from datasets.glyphs import open_images

    images = open_images("train")
    return divide(images, np.arange(len(images)), split, ways)


def open_omniglot(
    split: str, *, ways: int, data_root: Path, omniglot_split: str = "maml", **_unused: object
) -> Examples:
    """``ways`` classes of Omniglot.

    Raises :class:`DataError` as :func:`divide` and :func:`datasets.omniglot.open_images` do.
    """
    from datasets.omniglot import open_images
    from datasets.omniglot_classes import split_classes

    classes = split_classes(omniglot_split, "train")
    return divide(open_images(data_root), classes, split, ways)


def divide(
    images: NDArray[np.uint8], classes: NDArray[np.int64], split: str, ways: int
) -> Examples:
    """The drawings of ``split`` of the first ``ways`` of ``classes``; the label is the place there.

    ``images`` is uint8 ``[n, 20, H, W]``, ``classes`` some of its rows. Raises :class:`DataError`,
    naming the flag, if there are too few classes.
    """
    if not 1 <= ways <= len(classes):
        raise DataError(f"--ways {ways}: the train split has only {len(classes)} classes")
    places = np.asarray(PLACES[split])
    rows = classes[:ways, None] * images.shape[1] + places
    labels = np.repeat(np.arange(ways, dtype=np.int64), len(places))
    flat = images.view(np.ndarray).reshape(-1, *images.shape[2:])
    return Examples(flat, rows.reshape(-1).astype(np.int64), labels)
