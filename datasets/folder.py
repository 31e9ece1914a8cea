"""``--data folder``: a user's own images, in folders of classes.

``--data-root`` is the folder itself. Either the user divides it (``PATH/train/<class>/*``, the same
for the other splits), or it holds ``PATH/<class>/*`` and the program divides the classes. The cache
holds a split's decoded images in one array. The array's name depends on the paths, sizes and times
of the files, so a changed folder is decoded again.
"""

import itertools
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from datasets import addresses
from datasets.episodes import SPLITS, ImageClasses
from datasets.errors import DataError
from datasets.image_files import Decoder, Mode, cached_images, in_folder, look, shown
from datasets.paths import default_data_root

COMPONENTS = {
    "folder": {
        "help": "your own images: a folder of folders of classes, of any size and number",
        "attribute": "open_classes",
        "image_shape": "image_shape",
        "own_images": True,
        "reads": ("image_size", "image_mode", "split_fractions"),
    }
}


# The name of a folder, to its split.
_VALIDATION = ("validation", "val", "valid")
_SPLIT_OF = {"train": "train", **dict.fromkeys(_VALIDATION, "validation"), "test": "test"}
FRACTIONS = "0.64,0.16,0.2"  # for train, validation and test: MiniImageNet's 64, 16 and 20 of 100

_FORMS = "the whole folder must hold <class>/*, or train/<class>/*, val/<class>/*, test/<class>/*"

# A constant of the project, not the run's --seed: every run tests on the same classes.
_SEED = 2016

Classes: TypeAlias = dict[str, list[str]]  # a class's path below the folder, to the class's images


def image_shape(
    *, image_size: int = 84, image_mode: Mode = "rgb", **_unused: object
) -> tuple[int, int, int]:
    """Return the (C, H, W) of the images. Only the request determines it."""
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
    """Return a split's classes, in the order of names; refuse too few before images are decoded."""
    decoder = Decoder(image_size, image_mode)
    root, classes = _divided(data_root, split_fractions, split, ways)
    images = list(itertools.chain.from_iterable(classes.values()))
    name = re.sub(r"[^A-Za-z0-9]+", "-", root.name)[:40]
    source = in_folder(root, images, decoder.file)
    array = cached_images(
        # Raise the 2 when the decoder's output changes.
        f"folder/{name}-{split}-upright-white-fit-lanczos-2-{image_mode}-{image_size}",
        [source._replace(state=f"{root.resolve()}\n{source.state}")],
        (len(images), *decoder.shape),
        title=f"decoding {len(images)} images of {shown(root)} ({split})",
    )
    counts = [len(files) for files in classes.values()]
    return ImageClasses.in_order(array, counts, [*map(shown, classes)])


def own_name(name: str) -> str:
    """Return a class name of :func:`open_classes` without the folder of its split."""
    split, _, rest = name.partition("/")
    return rest if rest and split in _SPLIT_OF else name


def list_images(place: Path | str) -> list[tuple[str, str]]:
    """Return each image of a folder of classes, a folder of images, or one file: path and class.

    The class is "" if there are only images.
    """
    root = Path(os.path.expanduser(place)).absolute()
    if root.is_file():
        return [(str(root), "")]
    top = look(root)
    if top.images and top.folders:
        both = f"images ({shown(top.images[0])}) and folders ({shown(top.folders[0])})"
        raise DataError(f"{shown(root)}: holds {both}; let it hold one or the other")
    classes = _classes(root, "", top.folders or [""])
    # A disk may encode accents in another form.
    names = {name: unicodedata.normalize("NFC", name) for name in classes}
    return [(str(root / image), names[name]) for name, some in classes.items() for image in some]


def _divided(data_root: Path, split_fractions: str, split: str, ways: int) -> tuple[Path, Classes]:
    """Return the user's folder and the split's classes, of which there must be ``ways``."""
    if Path(data_root) == default_data_root():
        raise DataError("--data folder needs --data-root, the folder of your images")
    root = Path(data_root).expanduser().absolute()
    if not (top := look(root).folders):
        raise DataError(f"{shown(root)}: no folders of images in it; {_FORMS}")
    # A folder `test` that has no folders in it is a class with the name `test`.
    if there := [name for name in _SPLIT_OF if name in top and look(root, name).folders]:
        if split_fractions != FRACTIONS:
            already = f"{shown(root)} is divided into {', '.join(there)} already"
            raise DataError(f"--split-fractions {split_fractions}: {already}")
        if len(twice := [name for name in there if name in _VALIDATION]) > 1:
            both = " and ".join(twice)
            raise DataError(f"{shown(root)}: has {both}, which mean the same; keep one")
        splits = {
            _SPLIT_OF[name]: _classes(root, f"{name}/", look(root, name).folders) for name in there
        }
        _check_disjoint(root, itertools.chain.from_iterable(splits.values()))
    else:
        drawn = _drawn(len(top), split_fractions)
        splits = {part: _classes(root, "", [top[row] for row in drawn[part]]) for part in drawn}
    if len(splits.get(split, ())) < max(ways, 1):
        counts = ", ".join(f"{part} {len(classes)}" for part, classes in splits.items())
        raise DataError(
            f"--ways {ways}: too few classes for {split}; {shown(root)} has {counts}: add classes, "
            "ask for fewer or, where the program divides them, give other --split-fractions"
        )
    return root, splits[split]


def _classes(root: Path, below: str, names: Iterable[str]) -> Classes:
    classes = {f"{below}{name}": look(root, f"{below}{name}").images for name in names}
    if empty := [name for name, images in classes.items() if not images]:
        where = shown(root / empty[0])
        raise DataError(f"{where}: no images in it; add some, or remove it: {_FORMS}")
    return classes


def _drawn(n: int, fractions: str | Sequence[float]) -> dict[str, NDArray[np.int64]]:
    """Divide ``n`` classes at random, but the same way everywhere for equal ``n`` and fractions."""
    try:
        parts = fractions.split(",") if isinstance(fractions, str) else fractions
        shares = [float(part) for part in parts]
    except (TypeError, ValueError):
        shares = []
    # Negate the condition that must hold, so that nan fails, too.
    if not (len(shares) == 3 and min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6):
        raise DataError(
            f"--split-fractions {fractions}: must be three numbers, for train, validation and "
            f"test, that add up to 1, as {FRACTIONS}"
        )
    order = addresses.permutation(addresses.keys(_SEED, "folder", "split", 0), n)[0]
    ends = [int(sum(shares[: i + 1]) * n + 0.5) for i in range(2)]
    return {split: np.sort(part) for split, part in zip(SPLITS, np.split(order, ends), strict=True)}


def _check_disjoint(root: Path, names: Iterable[str]) -> None:
    """Raise :class:`DataError` if two splits share a class, because tested classes must be new."""
    seen: dict[str, str] = {}
    for path in names:
        name = unicodedata.normalize("NFC", path.split("/", 1)[1])
        if name in seen:
            raise DataError(
                f"{shown(root)}: {shown(seen[name])} and {shown(path)} have the same name, and "
                "few-shot splits share no class: move one, or rename it if it is another class"
            )
        seen[name] = path
