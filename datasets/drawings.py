"""Characters as ordinary classification: new drawings of known classes, not new classes.

The classes are the first ``--ways`` of the few-shot training split. Of each class's 20 drawings 14
are learned from, 2 validate and 4 test. Drawings have no order but that of who drew them (in
Omniglot one person drew the same place of every class of an alphabet), so the division is by place:
the test's are of hands that were never seen. Nothing is rotated.
"""

from __future__ import annotations

import numpy as np

from datasets.batches import Examples
from datasets.episodes import ImageClasses
from datasets.errors import DataError

PLACES: dict[str, range] = {
    "train": range(0, 14),
    "validation": range(14, 16),
    "test": range(16, 20),
}


def divide(found: ImageClasses, split: str, ways: int) -> Examples:
    """The drawings of ``split`` of the first ``ways`` classes; the label is the place there.

    Raises :class:`DataError`, naming the flag, if there are too few classes.
    """
    if not 1 <= ways <= len(found.first):
        raise DataError(f"--ways {ways}: the train split has only {len(found.first)} classes")
    places = np.asarray(PLACES[split])
    rows = found.first[:ways, None] + places
    labels = np.repeat(np.arange(ways, dtype=np.int64), len(places))
    return Examples(found.images.view(np.ndarray), rows.reshape(-1).astype(np.int64), labels)
