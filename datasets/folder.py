"""``--data folder``: a user's own images, in folders of classes.

``--data-root`` is the folder itself. It is divided by the user::

    PATH/train/<class>/*   PATH/validation/<class>/* (or val)   PATH/test/<class>/*

or has the classes beside one another, ``PATH/<class>/*``; then the program divides them, the same
way on every machine. Images may have any size and format, classes any number of images.

Look, decode once, map: the decoded images of all splits lie in one array in the cache. It is found
by the paths, sizes and times of the files, so that a folder that changed is decoded again and one
that did not opens at once.
"""

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datasets import addresses
from datasets.episodes import ImageClasses
from datasets.errors import DataError
from datasets.flags import flag
from datasets.image_files import Pixels, cached_images, in_folder, look, shown
from datasets.paths import default_data_root
from datasets.pixels import Decoder, Mode

COMPONENTS = {
    "folder": {
        "help": "your own images: a folder of folders of classes, of any size and number",
        "episodes": "open_classes",
        "image_shape": "image_shape",
        "classes": "list_classes",
        "own_images": True,
    }
}


class Flags:
    """What the components of this file read, and no other."""

    image_size: int = flag(
        84,
        "Width and height of the images; the shorter side is resized, the longer one cut.",
        least=1,
    )
    image_mode: Literal["rgb", "grey"] = flag("rgb", "Colour or grey.")
    split_fractions: str = flag(
        "0.64,0.16,0.2",
        "Of the classes, for train, validation and test, where they are not divided.",
    )


# What the folder of a split may be called.
SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "val"),
    "test": ("test",),
}
FRACTIONS = "0.64,0.16,0.2"
"""Of the classes, for train, validation and test: MiniImageNet's 64, 16 and 20 of 100."""

# A constant of the project, not the run's --seed: every run tests on the same classes.
_SEED = 2016
# Part of the cache's file name: raise it when the decoder's output changes.
_DECODER = "upright-white-fit-lanczos-2"


class Division(NamedTuple):
    """The classes of a folder, and where they belong.

    * ``classes``: the images of each class, by its path below the folder, in the array's order
    * ``splits``: the places in ``classes`` of each split's; int64 ``[c]``
    * ``divided``: whether the user divided them
    """

    classes: dict[str, list[str]]
    splits: dict[str, NDArray[np.int64]]
    divided: bool


class FolderImages(NamedTuple):
    """The images of a folder, decoded.

    * ``classes``: names of the classes, in order; one, ``""``, for a folder of images alone
    * ``arrays``: of each class uint8 ``[n, H, W]`` or ``[n, H, W, 3]``
    * ``files``: of each class the paths of its ``n`` images
    """

    classes: list[str]
    arrays: list[Pixels]
    files: list[list[str]]


def image_shape(*, image_size: int = 84, image_mode: Mode = "rgb") -> tuple[int, int, int]:
    """The (C, H, W) of the images, which the request alone determines."""
    return (3 if image_mode == "rgb" else 1, image_size, image_size)


def open_classes(
    split: str,
    *,
    data_root: Path,
    image_size: int = 84,
    image_mode: Mode = "rgb",
    split_fractions: str = FRACTIONS,
    ways: int = 0,
    **_unused: object,
) -> ImageClasses:
    """The classes of a split, in the order of their names, not to be rotated.

    What is done to an image is in :meth:`datasets.pixels.Decoder.image`. Where the user did not
    divide the classes, ``split_fractions`` of them, drawn once and for all, are each split's.

    Raises :class:`DataError`, before anything is decoded, for a folder that is not in order, or
    that has fewer classes than ``ways``; and for images that cannot be decoded.
    """
    decoder = Decoder(image_size, image_mode)
    root, found = _divided(data_root, split_fractions, {split: ways})
    images = list(itertools.chain.from_iterable(found.classes.values()))
    name = re.sub(r"[^A-Za-z0-9]+", "-", root.name)[:40]
    array = cached_images(
        f"folder/{name}-{_DECODER}-{image_mode}-{image_size}",
        [in_folder(root, images, decoder.file)],
        (len(images), *decoder.shape),
        title=f"decoding {len(images)} images of {shown(root)}",
    )
    counts = np.array([len(files) for files in found.classes.values()], dtype=np.int64)
    names, rows = list(found.classes), found.splits[split]
    return ImageClasses(
        array,
        (np.cumsum(counts) - counts)[rows],
        counts[rows],
        rotate=False,
        names=[shown(names[row]) for row in rows],
    )


def list_classes(
    *, data_root: Path, ways: Mapping[str, int], split_fractions: str = FRACTIONS, **_unused: object
) -> dict[str, list[str]]:
    """The classes of each split, or :class:`DataError`; paths below the folder. Decodes nothing."""
    _, found = _divided(data_root, split_fractions, ways)
    names = list(found.classes)
    return {split: [names[row] for row in rows] for split, rows in found.splits.items()}


def own_name(name: str) -> str:
    """What a class is called that :func:`list_classes` names: without the folder of its split."""
    split, _, rest = name.partition("/")
    return rest if rest and split in sum(SPLITS.values(), ()) else name


def read_images(place: Path | str, size: int, mode: Mode) -> FolderImages:
    """Decode the images of a folder of classes, of a folder of images without classes, or one file.

    For few images, to predict with: nothing goes into the cache. Otherwise as in training. Raises
    :class:`DataError` as :func:`open_classes` does, and where images lie beside folders of images.
    """
    root = Path(place).expanduser().absolute()
    if root.is_file():
        root, classes = root.parent, {"": [root.name]}
    else:
        top = look(root)
        if top.images and top.folders:
            raise DataError(
                f"{shown(root)}: holds images ({shown(top.images[0])}) and folders "
                f"({shown(top.folders[0])}); let it hold one or the other"
            )
        classes = {name: _images(root, name) for name in top.folders or [""]}
    images = list(itertools.chain.from_iterable(classes.values()))
    pixels = np.concatenate(list(in_folder(root, images, Decoder(size, mode).file).chunks()))
    ends = list(itertools.accumulate(len(files) for files in classes.values()))
    return FolderImages(
        list(classes),
        np.split(pixels, ends[:-1]),
        [[str(root / image) for image in files] for files in classes.values()],
    )


def _divided(
    data_root: Path, split_fractions: str, ways: Mapping[str, int]
) -> tuple[Path, Division]:
    """The folder that the user names, and its classes; ``ways`` are those that splits must have."""
    if Path(data_root) == default_data_root():
        raise DataError("--data folder needs --data-root, the folder of your images")
    root = Path(data_root).expanduser().absolute()
    found = _divide(root, split_fractions)
    _check_ways(root, found, ways)
    return root, found


def _images(root: Path, name: str) -> list[str]:
    """The images of a class. Raises :class:`DataError` if there are none."""
    images, folders = look(root, name)
    if images:
        return images
    there = (
        f"but the folder {shown(folders[0])}: images lie directly in their class's folder, and "
        "--data-root is to hold <class>/* or train/<class>/* and so on"
        if folders
        else "put images there, or remove it"
    )
    raise DataError(f"{shown(root / name)}: no images in it, {there}")


def _divide(root: Path, split_fractions: str) -> Division:
    """Look through a folder. One called ``test`` that has no folders is a class of that name."""
    shares = _parse_fractions(split_fractions)
    top = look(root).folders
    if not top:
        raise DataError(
            f"{shown(root)}: no folders of images in it; --data-root is to hold <class>/*, or "
            "train/<class>/*, validation/<class>/* and test/<class>/*"
        )
    split_of = {name: split for split, names in SPLITS.items() for name in names}
    there = [name for name in split_of if name in top and look(root, name).folders]
    if not there:
        classes = {name: _images(root, name) for name in top}
        return Division(classes, _drawn(len(classes), shares), divided=False)
    if split_fractions != FRACTIONS:
        raise DataError(
            f"--split-fractions {split_fractions}: {shown(root)} is divided into "
            f"{', '.join(there)} already"
        )
    if {"validation", "val"} <= {*there}:
        raise DataError(f"{shown(root)}: has validation and val, which mean the same; keep one")
    classes, splits = {}, {}
    for name in there:
        names = [f"{name}/{folder}" for folder in look(root, name).folders]
        n = len(classes)
        splits[split_of[name]] = np.arange(n, n + len(names), dtype=np.int64)
        classes |= {each: _images(root, each) for each in names}
    _check_disjoint(root, classes)
    return Division(classes, splits, divided=True)


def _parse_fractions(text: str) -> tuple[float, float, float]:
    try:
        train, validation, test = (float(part) for part in text.split(","))
    except ValueError:
        train = validation = test = -1.0
    # `not` a chain of `<=`: nan must fail too.
    if not min(train, validation, test) >= 0 or not abs(train + validation + test - 1) <= 1e-6:
        raise DataError(
            f"--split-fractions {text}: must be three numbers, for train, validation and test, "
            f"that add up to 1, as {FRACTIONS}"
        )
    return train, validation, test


def _drawn(n: int, shares: Sequence[float]) -> dict[str, NDArray[np.int64]]:
    """Divide ``n`` classes at random: the same for the same ``n`` and ``shares``, everywhere."""
    order = addresses.permutation(addresses.keys(_SEED, "folder", "split", 0), n)[0]
    ends = [int(sum(shares[: i + 1]) * n + 0.5) for i in range(2)]
    return {split: np.sort(part) for split, part in zip(SPLITS, np.split(order, ends), strict=True)}


def _check_ways(root: Path, found: Division, ways: Mapping[str, int]) -> None:
    """Raise :class:`DataError` where a split is missing or has too few classes."""
    for split in ways:
        if split not in found.splits:
            raise DataError(
                f"{shown(root)}: no folder {' or '.join(SPLITS[split])} with classes in it, as "
                f"there is for {' and '.join(found.splits)}; make one, or put all classes beside "
                "one another into one folder: --split-fractions divides them"
            )
    if few := [split for split, least in ways.items() if len(found.splits[split]) < least]:
        there = ", ".join(f"{split} {len(rows)}" for split, rows in found.splits.items())
        also = "" if found.divided else " or other --split-fractions"
        raise DataError(
            f"--ways {max(ways[split] for split in few)}: too few classes for "
            f"{' and '.join(few)}; {shown(root)} has {there}: add classes, or give a smaller "
            f"--ways (in training: --train-ways){also}"
        )


def _check_disjoint(root: Path, names: Iterable[str]) -> None:
    """Raise :class:`DataError` for a class in two splits: it would be tested on, and learned."""
    seen: dict[str, str] = {}
    for path in names:
        name = unicodedata.normalize("NFC", path.split("/", 1)[1])
        if name in seen:
            raise DataError(
                f"{shown(root)}: {shown(seen[name])} and {shown(path)} have the same name, and "
                "few-shot splits share no class: move one, or rename it if it is another class"
            )
        seen[name] = path
