"""MiniImageNet: 100 classes of ImageNet, 600 images each, 84x84 (Vinyals et al. 2016).

The split is Ravi & Larochelle's (2017). The images are ImageNet's, so nothing downloads them.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from datasets import array_pickle
from datasets.episodes import ImageClasses
from datasets.errors import DataError
from datasets.image_files import Pixels, Source, cached_images, in_folder, in_tar, look, stamp

COMPONENTS = {
    "miniimagenet": {
        "help": "100 classes of ImageNet in colour, 600 images each, 64/16/20 classes",
        "attribute": "open_classes",
        "image_shape": (3, 84, 84),
    }
}

CLASSES: dict[str, int] = {"train": 64, "validation": 16, "test": 20}
PER_CLASS = 600
# The names of the splits on disk, as they are published.
FILES: dict[str, str] = {"train": "train", "validation": "val", "test": "test"}
SIZE = (84, 84)
SHAPE = (*SIZE, 3)

Table: TypeAlias = dict[str, set[str]]  # a label, to the names of its files


def open_classes(split: str, *, data_root: Path, **_unused: object) -> ImageClasses:
    """Return the classes of a split, without rotation, in the order of their labels.

    Images are in the order of their file names. Images of a pickle (as published by Ren et al.
    2018, arXiv:1803.00676) keep the order of the pickle. So equal pixels make equal tasks, in every
    form of the files.
    """
    folder = Path(data_root).expanduser() / "miniimagenet"
    images = cached_images(
        f"miniimagenet/{split}-rgb-lanczos-1",  # raise the 1 when the decoder's output changes
        [_source(folder, split)],
        (CLASSES[split], PER_CLASS, *SHAPE),
        title=f"decoding MiniImageNet ({split})",
    )
    return ImageClasses.of_equal_size(images, np.arange(len(images)), rotate=False)


def _source(folder: Path, split: str) -> Source:
    """Return the source of a split: the first that exists of the forms in which it circulates."""
    name, classes = FILES[split], CLASSES[split]
    table, archive, images = folder / f"{name}.csv", folder / f"{name}.tar.xz", folder / "images"
    if table.is_file() and archive.is_file():
        return in_tar(archive, _in_order(table, read_table(table), classes), decode)
    if table.is_file() and images.is_dir():
        return in_folder(images, _in_order(table, read_table(table), classes), decode)
    for by_class in (folder / name, folder / split):
        if by_class.is_dir():
            files = {label: {*look(by_class, label).images} for label in look(by_class).folders}
            return in_folder(by_class, _in_order(by_class, files, classes), decode)
    for pickled in (folder / f"mini-imagenet-cache-{called}.pkl" for called in (name, split)):
        if pickled.is_file():
            return Source(stamp(pickled), partial(read_pickle, pickled, classes))
    raise DataError(
        f"{folder}: has neither {name}.csv with {name}.tar.xz or images/, nor {name}/, nor "
        f"mini-imagenet-cache-{name}.pkl; MiniImageNet is not downloaded: put it there in one of "
        "these forms (docs/data.md), or point --data-root or $MAML_DATA at a folder that has "
        "miniimagenet/; the omniglot presets download their data, and *-glyphs-* presets need none"
    )


def read_table(path: Path) -> Table:
    """Read a table with the columns ``filename`` and ``label``."""
    table: Table = defaultdict(set)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            for row in csv.DictReader(file):
                if not row["filename"] or not row["label"] or "/" in row["filename"]:
                    raise ValueError(f"{row['filename']} of {row['label']}")
                table[row["label"]].add(row["filename"])
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise DataError(f"{path}: no table of filename,label ({error}); restore it") from error
    return table


def _in_order(path: Path, table: Table, classes: int) -> list[str]:
    """Return all files by class, or raise a :class:`DataError` that names ``path``."""
    counts = {f"{label} has {len(names)} images": len(names) for label, names in table.items()}
    wrong = [f"{text} instead of {PER_CLASS}" for text, n in counts.items() if n != PER_CLASS]
    if len(table) != classes:
        wrong = [f"{len(table)} classes instead of {classes}"]
    if wrong:
        raise DataError(f"{path}: {min(wrong)}; restore all of it")
    return [name for _, names in sorted(table.items()) for name in sorted(names)]


def decode(image: Image.Image) -> Pixels:
    """Convert an image of any size to uint8 ``[84, 84, 3]``, RGB."""
    colour = image.convert("RGB")
    if colour.size != SIZE:
        colour = colour.resize(SIZE, Image.Resampling.LANCZOS)
    return np.asarray(colour, dtype=np.uint8)


def read_pickle(path: Path, classes: int) -> Iterator[Pixels]:
    """Yield the classes of a pickle in the order of names, each uint8 ``[images, 84, 84, 3]``."""
    content = array_pickle.read(path)  # all images, and the rows of each class
    try:
        images = array_pickle.array(content["image_data"])
        rows = {str(label): array_pickle.array(n) for label, n in content["class_dict"].items()}
        if images.dtype != np.uint8 or images.shape[1:] != SHAPE:
            raise ValueError("image_data is no uint8 [n, 84, 84, 3]")
        if len(rows) != classes:
            raise ValueError(f"{len(rows)} classes instead of {classes}")
        for label, some in rows.items():
            if some.dtype.kind not in "iu" or some.shape != (PER_CLASS,):
                raise ValueError(f"{label} is not {PER_CLASS} rows")
        used = np.unique(np.concatenate(list(rows.values())))
        if used[0] < 0 or used[-1] >= len(images) or len(used) < classes * PER_CLASS:
            raise ValueError(f"it lists a row twice, or rows beyond the {len(images)} images")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{path}: no image_data and class_dict as it should have ({error}); fetch it again"
        ) from error
    for label in sorted(rows):
        yield images[rows[label]]
