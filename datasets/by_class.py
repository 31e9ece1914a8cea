"""``{class: images}``, as a user's own function returns it: for few-shot tasks and mini-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from datasets.batches import Examples
from datasets.episodes import ImageClasses
from datasets.errors import DataError
from datasets.registry import FLAG


def image_classes(found: Any, data: str, split: str) -> ImageClasses:
    """The classes of a mapping, or of a list whose places are their names; they are copied.

    Raises :class:`DataError`, naming ``data`` and ``split``, unless all are images of one size.
    """
    if isinstance(found, Sequence):
        found = dict(enumerate(found))
    if not isinstance(found, Mapping) or not found:
        raise DataError(
            f"{FLAG} {data}: returned {type(found).__name__} for {split}, not {{class: images}}, "
            "ImageClasses, Examples, Episodes or a Taskset of learn2learn"
            if not isinstance(found, Mapping)
            else f"{FLAG} {data}: returned no class for {split}"
        )
    arrays = {str(name): np.asarray(images) for name, images in found.items()}
    size = next(iter(arrays.values())).shape[1:]
    for name, images in arrays.items():
        is_image = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
        if images.dtype != np.uint8 or not is_image or images.shape[1:] != size:
            raise DataError(
                f"{FLAG} {data}: class {name} of {split} is {images.dtype} {list(images.shape)}; "
                "all must be uint8 [n, H, W] or [n, H, W, 3], of one size"
            )
    counts = np.array([len(images) for images in arrays.values()], dtype=np.int64)
    images = np.concatenate(list(arrays.values()))
    return ImageClasses(images, np.cumsum(counts) - counts, counts, rotate=False, names=[*arrays])


def examples(
    found: ImageClasses, learned: Sequence[str], data: str, split: str, ways: int
) -> Examples:
    """The images of classes that have names, labelled by their place among those ``learned``.

    Another split may have them in another order. Raises :class:`DataError` if there are not
    ``ways`` classes, or not the same in both splits.
    """
    names, n = found.names or (), len(learned)
    if n != ways:
        raise DataError(f"--ways {ways}: {data} has {n} classes; give --ways {n}")
    if strange := sorted({*names} ^ {*learned}):
        where = "train" if strange[0] in names else split
        raise DataError(
            f"{FLAG} {data}: class {strange[0]} is missing in {where}: ordinary classification "
            f"has the same classes in train and in {split}"
        )
    label_of = {name: label for label, name in enumerate(learned)}
    labels = np.repeat(np.array([label_of[name] for name in names], np.int64), found.counts)
    places = zip(found.first, found.counts, strict=True)
    rows = np.concatenate([np.arange(first, first + count) for first, count in places])
    return Examples(found.images, rows.astype(np.int64), labels)
