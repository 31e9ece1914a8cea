"""CIFAR-FS and FC100: few-shot tasks from CIFAR-100's 100 classes of 600 images, 32x32.

Both take CIFAR-100 as torchvision finds and downloads it, under ``<data-root>/cifar100``. The
images of its two parts are put together by class; the cache keeps that.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datasets.cache import Mapped, cached
from datasets.cifar_classes import CLASSES, HELD_OUT, labels
from datasets.episodes import ImageClasses
from datasets.errors import DataError
from datasets.torchvision_sets import SOURCES, read_part

COMPONENTS = {
    "cifarfs": {
        "help": "CIFAR-100 in colour, 600 images of each class, 64/16/20 classes",
        "episodes": "open_classes",
        "classes": "list_classes",
        "images_of": "cifar100",
        "image_shape": (3, 32, 32),
    },
    "fc100": {
        "like": "cifarfs",
        "help": "CIFAR-100 in colour, 60/20/20 classes that have no superclass in common",
    },
}

_CIFAR = "cifar100"
# Part of the cache's file name: raise it when the order of the images changes.
_ORDER = "v1"


def open_classes(split: str, *, name: str, data_root: Path, **_unused: object) -> ImageClasses:
    """The classes of a split of "cifarfs" or "fc100", in the order of their names, not rotated.

    Raises :class:`DataError`, in one line, if there is no such split, or if CIFAR-100's files are
    missing or damaged and cannot be downloaded.
    """
    if split not in ("train", *HELD_OUT[name]):
        raise DataError(f"--split {split}: unknown; one of train, validation, test")
    return ImageClasses.of_equal_size(open_images(data_root), labels(name, split), rotate=False)


def list_classes(*, name: str, **_unused: object) -> dict[str, list[str]]:
    """The classes of each split of "cifarfs" or "fc100", as CIFAR-100 calls them."""
    return {
        split: [CLASSES[label] for label in labels(name, split)]
        for split in ("train", *HELD_OUT[name])
    }


def open_images(data_root: Path) -> Mapped:
    """CIFAR-100 by class, read-only: uint8 ``[100, 600, 32, 32, 3]``, RGB.

    Of each class torchvision's training images come first, then its test images, in its order.
    Raises :class:`DataError` as :func:`open_classes` does.
    """
    source = SOURCES[_CIFAR]
    per_class = sum(source.sizes.values()) // source.classes
    return cached(
        f"{_CIFAR}/{_ORDER}-by-class.npy",
        (source.classes, per_class, *source.shape),
        lambda: iter([_by_class(Path(data_root).expanduser() / _CIFAR)]),
        title="reading CIFAR-100 by class",
    )


def _by_class(folder: Path) -> NDArray[np.uint8]:
    parts = [read_part(_CIFAR, part, folder) for part in ("train", "test")]
    images, of_class = (np.concatenate(both) for both in zip(*parts, strict=True))
    counts = np.bincount(of_class, minlength=SOURCES[_CIFAR].classes)
    if len(set(counts.tolist())) != 1:
        raise DataError(f"{folder}: not CIFAR-100, its classes have {counts.min()} images and more")
    ordered = images[np.argsort(of_class, kind="stable")]
    return ordered.reshape(len(counts), -1, *images.shape[1:])
