"""``--data folder``: a user's own images, in folders of classes.

``--data-root`` is the folder itself. It is divided by the user::

    PATH/train/<class>/*   PATH/validation/<class>/* (or val)   PATH/test/<class>/*

or has the classes beside one another, ``PATH/<class>/*``; then the program divides them, the same
way on every machine. Images may have any size and format, classes any number of images.

Look, decode once, map: the decoded images of all splits lie in one array in the cache. It is found
by the paths, sizes and times of the files, so that a folder that changed is decoded again and one
that did not opens at once.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datasets import addresses
from datasets.cache import cached
from datasets.episodes import ImageClasses
from datasets.errors import DataError
from datasets.flags import flag
from datasets.folder_source import (
    Content,
    Decoding,
    ImageFile,
    Mode,
    decode_all,
    fingerprint,
    look,
    say_ignored,
    shown,
)
from datasets.paths import default_data_root

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
MODES = ("rgb", "grey")
FRACTIONS = "0.64,0.16,0.2"
"""Of the classes, for train, validation and test: MiniImageNet's 64, 16 and 20 of 100."""

# A constant of the project, not the run's --seed: every run tests on the same classes.
_SEED = 2016
# Part of the fingerprint: raise it when the decoder's output changes.
_DECODER = "upright-white-fit-lanczos-2"
_MOST_PIXELS = 4096


class Division(NamedTuple):
    """The classes of a folder, and where they belong.

    * ``classes``: the images of each class, in the order of the array
    * ``names``: the classes' paths below the folder
    * ``splits``: the places in ``classes`` of each split's; int64 ``[c]``
    * ``others``: files that are not images, by ending
    * ``divided``: whether the user divided them
    """

    classes: list[list[ImageFile]]
    names: list[str]
    splits: dict[str, NDArray[np.int64]]
    others: Counter[str]
    divided: bool


class FolderImages(NamedTuple):
    """The images of a folder, decoded.

    * ``classes``: names of the classes, in order; one, ``""``, for a folder of images alone
    * ``arrays``: of each class uint8 ``[n, H, W]`` or ``[n, H, W, 3]``
    * ``files``: of each class the paths of its ``n`` images
    """

    classes: list[str]
    arrays: list[NDArray[np.uint8]]
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

    ``image_size`` is in pixels; what is done to an image is in
    :func:`datasets.folder_source.decode`. Where the user did not divide the classes,
    ``split_fractions`` of them, drawn once and for all, are each split's. That it has fewer than
    ``ways`` is said before anything is decoded.

    Raises :class:`DataError`, in one line, for a folder that is not in order: none or empty, a
    class without images or in two splits, images that cannot be decoded.
    """
    if split not in SPLITS:
        raise DataError(f"--split {split}: unknown; one of {', '.join(SPLITS)}")
    root = _own_folder(data_root)
    decoding = _decoding(image_size, image_mode)
    found = divide(root, split_fractions)
    _check_ways(root, found, {split: ways})
    images = [image for files in found.classes for image in files]
    name = re.sub(r"[^A-Za-z0-9]+", "-", root.name)[:40]
    title = f"decoding {len(images)} images of {shown(root)}"

    def build() -> Iterator[NDArray[np.uint8]]:
        say_ignored(root, found.others)
        return decode_all(root, images, decoding)

    array = cached(
        f"folder/{name}-{fingerprint(images, decoding, _DECODER)}.npy",
        (len(images), *decoding.shape),
        build,
        title=title,
    )
    counts = np.array([len(files) for files in found.classes], dtype=np.int64)
    rows = found.splits[split]
    return ImageClasses(
        array,
        (np.cumsum(counts) - counts)[rows],
        counts[rows],
        rotate=False,
        names=[shown(found.names[row]) for row in rows],
        # Joined by hand: pathlib is slow at it, and there are many.
        files=[f"{root}/{image.path}" for image in images],
    )


def list_classes(
    *,
    data_root: Path,
    ways: Mapping[str, int],
    split_fractions: str = FRACTIONS,
    **_unused: object,
) -> dict[str, list[str]]:
    """The classes of each split, by name: their paths below the folder. Decodes nothing.

    Raises :class:`DataError` as :func:`open_classes` does, for any split of ``ways`` that has fewer
    classes than its ways.
    """
    root = _own_folder(data_root)
    found = divide(root, split_fractions)
    _check_ways(root, found, ways)
    return {split: [found.names[row] for row in rows] for split, rows in found.splits.items()}


def own_name(name: str) -> str:
    """What a class is called that :func:`list_classes` names: without the folder of its split."""
    split, _, rest = name.partition("/")
    return rest if rest and split in sum(SPLITS.values(), ()) else name


def _check_ways(root: Path, found: Division, ways: Mapping[str, int]) -> None:
    """Raise :class:`DataError` where a split is missing or has too few classes."""
    for split in ways:
        if split not in found.splits:
            raise DataError(
                f"{shown(root)}: no folder {' or '.join(SPLITS[split])} with classes in it, as "
                f"there is for {' and '.join(found.splits)}; make one, or put all classes beside "
                "one another into one folder: --split-fractions divides them"
            )
    sizes = {split: len(rows) for split, rows in found.splits.items()}
    if few := [split for split, least in ways.items() if sizes[split] < least]:
        there = ", ".join(f"{split} {size}" for split, size in sizes.items())
        raise DataError(
            f"--ways {max(ways[split] for split in few)}: too few classes for "
            f"{' and '.join(few)}; {shown(root)} has {there}: "
            f"{_way_out(found, sizes, ways)}"
        )


def _way_out(found: Division, sizes: Mapping[str, int], ways: Mapping[str, int]) -> str:
    """What to do about too few classes."""
    n, least = len(found.names), sum(ways.values())
    smaller = min(sizes[split] for split in ways)
    fewer = f"--ways {smaller}" if smaller > 1 else ""
    if found.divided:
        return " or ".join(["add classes", *([f"give {fewer}"] if fewer else [])])
    if n < least:
        each = n // len(SPLITS)
        fractions = _fractions(n, [each] * len(SPLITS))
        also = f", or give --ways {each} --split-fractions {fractions}" if each > 1 else ""
        return f"all in all {least} are needed: add classes{also}"
    # For all three splits if there are enough, else for those that are asked for.
    every = [ways.get(split, max(ways.values())) for split in SPLITS]
    asked = [ways.get(split, 0) for split in SPLITS]
    fractions = _fractions(n, every if sum(every) <= n else asked)
    return f"give --split-fractions {fractions}" + (f", or {fewer}" if fewer else "")


def _fractions(n: int, least: Sequence[int]) -> str:
    """Fractions that give each split at least so many of ``n`` classes, and the rest to train."""
    _, validation, test = least
    for digits in (1, 2, 3, 4):
        unit = 10**digits
        # Of the smaller ones a little more than what they need: ends are rounded.
        parts = [-(-part * unit // n) for part in (validation, test)]
        for more in (0, 1):
            low, high = (part + more * bool(part) for part in parts)
            shares = (unit - low - high) / unit, low / unit, high / unit
            if shares[0] < 0:
                continue
            sizes = [len(rows) for rows in _drawn(n, shares).values()]
            if all(size >= enough for size, enough in zip(sizes, least, strict=True)):
                return ",".join(f"{share:.{digits}f}" for share in shares)
    return f"{(n - validation - test) / n:.6f},{validation / n:.6f},{test / n:.6f}"


def read_images(place: Path | str, size: int, mode: Mode) -> FolderImages:
    """Decode the images of a folder of classes, of a folder of images without classes, or one file.

    For few images, to predict with: all of them in memory, nothing in the cache. ``size`` and
    ``mode`` are as in training, and so is what is done to an image. Raises :class:`DataError` as
    :func:`open_classes` does, and where images lie beside folders of images.
    """
    decoding = _decoding(size, mode)
    file = Path(place).expanduser().absolute()
    if file.is_file():
        (pixels,) = decode_all(file.parent, [ImageFile(file.name, 0, 0)], decoding)
        return FolderImages([""], [pixels], [[str(file)]])
    root = _folder(place)
    top = look(root)
    if top.images and top.folders:
        raise DataError(
            f"{shown(root)}: holds images ({shown(top.images[0].path)}) and folders "
            f"({shown(top.folders[0])}); let it hold one or the other"
        )
    others = top.others.copy()
    if top.folders:
        names = top.folders
        classes = [_class(root, name, others) for name in names]
    else:
        others = Counter()  # those of the top are counted with its images
        names, classes = [""], [_images_in(root, "", top, others)]
    say_ignored(root, others)
    images = [image for files in classes for image in files]
    pixels = np.concatenate(list(decode_all(root, images, decoding)))
    ends = list(itertools.accumulate(len(files) for files in classes))
    return FolderImages(
        list(names),
        np.split(pixels, ends[:-1]),
        [[str(root / image.path) for image in files] for files in classes],
    )


def divide(root: Path, split_fractions: str = FRACTIONS) -> Division:
    """Look through a folder: its classes, and the split of each. Decodes nothing.

    Raises :class:`DataError` as :func:`open_classes` does.
    """
    shares = parse_fractions(split_fractions)
    top = look(root)
    if not top.folders:
        raise DataError(
            f"{shown(root)}: no folders of images in it; --data-root is to hold <class>/*, or "
            "train/<class>/*, validation/<class>/* and test/<class>/*"
        )
    others = top.others.copy()
    _belong_to_none(top.images, others)
    by_split = _split_folders(root, top, others)
    if not by_split:
        names = list(top.folders)
        return Division(
            [_class(root, name, others) for name in names],
            names,
            _drawn(len(names), shares),
            others,
            divided=False,
        )
    if split_fractions != FRACTIONS:
        raise DataError(
            f"--split-fractions {split_fractions}: {shown(root)} is divided into "
            f"{', '.join(by_split)} already"
        )
    _check_disjoint(root, by_split)
    names, splits = [], {}
    for split, its_names in by_split.items():
        splits[split] = np.arange(len(names), len(names) + len(its_names), dtype=np.int64)
        names += its_names
    return Division(
        [_class(root, name, others) for name in names], names, splits, others, divided=True
    )


def parse_fractions(text: str | Sequence[float]) -> tuple[float, float, float]:
    """The fractions in ``0.64,0.16,0.2``, or three numbers.

    Raises :class:`DataError`, naming the flag.
    """
    if not isinstance(text, str):
        text = ",".join(map(str, text))
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


def _split_folders(root: Path, top: Content, others: Counter[str]) -> dict[str, list[str]]:
    """The classes of each split that has a folder with classes; none if the user divided nothing.

    A folder called ``test`` that holds images and no folders is a class of that name.
    """
    found: dict[str, list[str]] = {}
    for split, names in SPLITS.items():
        contents = {name: look(root, name) for name in names if name in top.folders}
        contents = {name: content for name, content in contents.items() if content.folders}
        if len(contents) > 1:
            raise DataError(
                f"{shown(root)}: has {' and '.join(contents)}, which mean the same; keep one"
            )
        for name, content in contents.items():
            found[split] = [f"{name}/{folder}" for folder in content.folders]
            others.update(content.others)
            _belong_to_none(content.images, others)
    if found:
        others["folders"] += len(top.folders) - len(found)
    return found


def _check_disjoint(root: Path, by_split: dict[str, list[str]]) -> None:
    """Raise :class:`DataError` for a class in two splits: it would be tested on, and learned."""
    seen: dict[str, str] = {}
    for path in itertools.chain.from_iterable(by_split.values()):
        name = unicodedata.normalize("NFC", path.split("/", 1)[1])
        if name in seen:
            raise DataError(
                f"{shown(root)}: {shown(seen[name])} and {shown(path)} have the same name, and "
                "few-shot splits share no class: the test is of classes never seen; move one, "
                "rename it if it is another class, or put all classes beside one another into one "
                "folder"
            )
        seen[name] = path


def _class(root: Path, name: str, others: Counter[str]) -> list[ImageFile]:
    """The images of a class. Raises :class:`DataError` if there are none."""
    return _images_in(root, name, look(root, name), others)


def _images_in(root: Path, name: str, content: Content, others: Counter[str]) -> list[ImageFile]:
    if not content.images:
        there = (
            f"but the folder {shown(content.folders[0])}: images lie directly in their class's "
            "folder, and --data-root is to hold <class>/* or train/<class>/* and so on"
            if content.folders
            else "put images there, or remove it"
        )
        raise DataError(f"{shown(root / name)}: no images in it, {there}")
    others.update(content.others)
    others["folders"] += len(content.folders)
    return content.images


def _belong_to_none(images: list[ImageFile], others: Counter[str]) -> None:
    """Count images that lie beside the folders of classes."""
    others.update(f"{Path(image.path).suffix.lower()} outside a class" for image in images)


def _own_folder(data_root: Path | str) -> Path:
    """The folder that the user names; the default is no folder of one's own images."""
    if Path(data_root) == default_data_root():
        raise DataError("--data folder needs --data-root, the folder of your images")
    return _folder(data_root)


def _folder(path: Path | str) -> Path:
    root = Path(path).expanduser().absolute()
    if not root.is_dir():
        raise DataError(
            f"{shown(root)}: {'not a folder' if root.exists() else 'no such folder'}; give the "
            "folder of your images"
        )
    return root


def _decoding(size: int, mode: str) -> Decoding:
    if not 1 <= size <= _MOST_PIXELS:
        raise DataError(f"--image-size {size}: must be between 1 and {_MOST_PIXELS}")
    if mode not in MODES:
        raise DataError(f"--image-mode {mode}: unknown; one of {', '.join(MODES)}")
    return Decoding(size, "rgb" if mode == "rgb" else "grey")
