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
from datasets.miniimagenet_pickle import Pickled
from datasets.miniimagenet_source import SHAPE, Images, list_classes, read_table

COMPONENTS = {
    "miniimagenet": {
        "help": "100 classes of ImageNet in colour, 600 images each, 64/16/20 classes",
        "episodes": "open_classes",
        "image_shape": (3, 84, 84),
    }
}

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

    Classes are in the order of their labels, images in that of their file names: equal pixels make
    equal tasks, whatever they lie in. Under ``data_root/miniimagenet`` it takes the first that is
    there of

    1. the table ``train.csv``, ``val.csv`` or ``test.csv`` with the columns ``filename`` and
       ``label``, and the images from the archive of the same name, ``train.tar.xz`` and so on, or
       else from the folder ``images``;
    2. ``<split>/<label>/*``, a folder for each class;
    3. ``mini-imagenet-cache-<split>.pkl``; of its images the order is the file's own.

    Raises :class:`DataError`, in one line, if there is no data, or if it is damaged or incomplete.
    """
    if split not in CLASSES:
        raise DataError(f"--split {split}: unknown; one of {', '.join(CLASSES)}")
    return open_split(Path(data_root).expanduser() / "miniimagenet", split, CLASSES[split])


def open_split(folder: Path, split: str, classes: int, per_class: int = PER_CLASS) -> Mapped:
    """:func:`open_images` for any number of classes and of images in each."""
    images = _source(folder, split, classes, per_class)
    fingerprint = hashlib.blake2b(
        f"{_DECODER}{images.fingerprint()}".encode(), digest_size=8
    ).hexdigest()
    return cached(
        f"miniimagenet/{split}-{fingerprint}.npy",
        (classes, per_class, *SHAPE),
        lambda: (images_of_class[None] for images_of_class in images.classes()),
        title=f"decoding MiniImageNet ({split})",
    )


def _source(folder: Path, split: str, classes: int, per_class: int) -> Images | Pickled:
    """The first that is there of the forms in which a split circulates."""
    name = FILES[split]
    csv, archive, extracted = folder / f"{name}.csv", folder / f"{name}.tar.xz", folder / "images"
    if csv.is_file() and (archive.is_file() or extracted.is_dir()):
        table = read_table(csv, classes, per_class)
        return Images(archive if archive.is_file() else extracted, table)
    for by_class in (folder / name, folder / split):
        if by_class.is_dir():
            return Images(by_class, list_classes(by_class, classes, per_class))
    for pickled in (folder / f"mini-imagenet-cache-{called}.pkl" for called in (name, split)):
        if pickled.is_file():
            return Pickled(pickled, classes, per_class)
    if not csv.is_file():
        raise DataError(f"{csv}: not found; {_ways_out(folder)}")
    raise DataError(f"{archive}: not found, nor the folder images; {_ways_out(folder)}")


def _ways_out(folder: Path) -> str:
    return (
        "MiniImageNet is not downloaded (docs/data.md says where it is): put train.csv, val.csv "
        "and test.csv and either train.tar.xz, val.tar.xz and test.tar.xz or one folder images "
        f"into {folder}, or the "
        "folders train, val and test with a folder for each class, or "
        "mini-imagenet-cache-{train,val,test}.pkl; or point --data-root or $MAML_DATA at a folder "
        "that has miniimagenet/; the omniglot presets download their data, and the maml-glyphs-* "
        "presets need none"
    )
