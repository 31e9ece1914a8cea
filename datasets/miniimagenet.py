"""MiniImageNet: 100 classes of ImageNet, 600 images each, 84x84 (Vinyals et al. 2016).

The split is Ravi & Larochelle's (2017). Locate, verify, decode once, map: :func:`open_images` finds
a split's table and its images, checks one against the other, and keeps a decoded copy in the cache
that every process maps. The images are ImageNet's, so nothing downloads them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from datasets.cache import Mapped, cached
from datasets.episodes import ImageClasses
from datasets.errors import DataError
from datasets.miniimagenet_source import SHAPE, Images, read_table

CLASSES: dict[str, int] = {"train": 64, "validation": 16, "test": 20}
PER_CLASS = 600
# The names of the splits on disk, as they are published.
FILES: dict[str, str] = {"train": "train", "validation": "val", "test": "test"}

# Part of the fingerprint: raise it when the decoder's output changes, and old caches are no longer
# found.
_DECODER = "rgb-lanczos-1"


def open_classes(split: str, *, data_root: Path, **_unused: object) -> ImageClasses:
    """The classes of a split, not to be rotated.

    Raises :class:`DataError` as :func:`open_images` does.
    """
    images = open_images(data_root, split)
    return ImageClasses.of_equal_size(images, np.arange(len(images)), rotate=False)


def open_images(data_root: Path, split: str) -> Mapped:
    """The images of a split, read-only: uint8 ``[classes, 600, 84, 84, 3]``, RGB.

    Classes are in the order of their labels, images in that of their file names. Under
    ``data_root/miniimagenet`` it takes the table ``train.csv``, ``val.csv`` or ``test.csv`` with
    the columns ``filename`` and ``label``, and the images from the archive of the same name,
    ``train.tar.xz`` and so on, or else from the folder ``images``. Raises :class:`DataError`, in
    one line, if there is no data, or if it is damaged or incomplete.
    """
    if split not in CLASSES:
        raise DataError(f"--split {split}: unknown; one of {', '.join(CLASSES)}")
    return open_split(Path(data_root).expanduser() / "miniimagenet", split, CLASSES[split])


def open_split(folder: Path, split: str, classes: int, per_class: int = PER_CLASS) -> Mapped:
    """:func:`open_images` for any number of classes and of images in each."""
    name = FILES[split]
    csv, archive, extracted = folder / f"{name}.csv", folder / f"{name}.tar.xz", folder / "images"
    if not csv.is_file():
        raise DataError(f"{csv}: not found; {_ways_out(folder)}")
    table = read_table(csv, classes, per_class)
    if not archive.is_file() and not extracted.is_dir():
        raise DataError(f"{archive}: not found, nor the folder images; {_ways_out(folder)}")
    images = Images(archive if archive.is_file() else extracted, table)
    fingerprint = hashlib.blake2b(
        f"{_DECODER}{table.fingerprint()}{images.fingerprint()}".encode(), digest_size=8
    ).hexdigest()
    return cached(
        f"miniimagenet/{split}-{fingerprint}.npy",
        (classes, per_class, *SHAPE),
        lambda: (images_of_class[None] for images_of_class in images.classes()),
        title=f"decoding MiniImageNet ({split})",
    )


def _ways_out(folder: Path) -> str:
    return (
        f"MiniImageNet cannot be downloaded: put train.csv, val.csv and test.csv and either "
        f"train.tar.xz, val.tar.xz and test.tar.xz or one folder images into {folder}, or point "
        "--data-root or $MAML_DATA at a folder that has miniimagenet/; the omniglot presets "
        "download their data, and the maml-glyphs-* presets need none"
    )
