"""``mini-imagenet-cache-*.pkl``: MiniImageNet as Ren et al. (2018, arXiv:1803.00676) publish it.

A dictionary with ``image_data``, uint8 ``[n, 84, 84, 3]``, and ``class_dict``, the rows of each
class. The images were resized by others, so their bits need not be those of the archives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datasets import array_pickle
from datasets.array_pickle import PickledArray
from datasets.errors import DataError
from datasets.miniimagenet_source import SHAPE, stamp


class Pickled:
    """A split in a pickle: ``classes`` of ``per_class`` images each."""

    def __init__(self, path: Path, classes: int, per_class: int) -> None:
        """Reads nothing yet."""
        self.path, self._classes, self._per_class = path, classes, per_class

    def fingerprint(self) -> str:
        """The size and modification time. Raises :class:`DataError` if it cannot be looked at."""
        try:
            return stamp(self.path)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error})") from error

    def classes(self) -> Iterator[NDArray[np.uint8]]:
        """The classes in the order of their names, each uint8 ``[images, 84, 84, 3]``.

        Images are in the order that ``class_dict`` lists them in. Raises :class:`DataError`, naming
        the file and what is wrong.
        """
        images, rows = self._read()
        for label in sorted(rows):
            yield images[rows[label]]

    def _read(self) -> tuple[NDArray[np.uint8], dict[str, NDArray[np.int64]]]:
        found = array_pickle.read(self.path)
        entries = _named(found) if isinstance(found, dict) else {}
        listed = entries.get("class_dict")
        if "image_data" not in entries or not isinstance(listed, dict):
            raise self._wrong("has no image_data and class_dict")
        images = self._values(entries["image_data"], "image_data")
        if images.dtype != np.uint8 or images.shape[1:] != SHAPE:
            raise self._wrong(f"image_data is {images.dtype} {list(images.shape)}")
        rows = {label: self._values(some, label) for label, some in _named(listed).items()}
        if len(rows) != self._classes or len(rows) != len(listed):
            raise self._wrong(f"{len(rows)} classes instead of {self._classes}")
        for label, some in rows.items():
            if some.dtype.kind not in "iu" or some.shape != (self._per_class,):
                raise self._wrong(
                    f"{label} is {some.dtype} {list(some.shape)} instead of {self._per_class} rows"
                )
            if some.min() < 0 or some.max() >= len(images):
                raise self._wrong(f"{label} has rows beyond the {len(images)} images")
        used = np.concatenate(list(rows.values()))
        if len(np.unique(used)) != len(used):
            raise self._wrong("a row is listed twice")
        return images, {label: some.astype(np.int64) for label, some in rows.items()}

    def _values(self, found: Any, name: str) -> NDArray[Any]:
        # A list of lists can be made to grow without end.
        if isinstance(found, list) and all(type(row) is int for row in found):
            return np.array(found)
        if not isinstance(found, PickledArray):
            raise self._wrong(f"{name} is no array")
        try:
            return np.asarray(found)
        except ValueError as error:
            raise self._wrong(f"{name} is {error}") from error

    def _wrong(self, words: str) -> DataError:
        return DataError(f"{self.path}: {words}; fetch the file again")


def _named(found: dict[Any, Any]) -> dict[str, Any]:
    """``found`` with its texts, which may be bytes of Python 2, as texts."""
    return {
        key.decode("latin-1") if isinstance(key, bytes) else str(key): value
        for key, value in found.items()
    }
