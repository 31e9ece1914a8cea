"""Omniglot: 1,623 handwritten characters, 20 drawings each (Lake et al., Science 2015)."""

import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from datasets import addresses
from datasets.cache import Mapped
from datasets.downloads import downloading
from datasets.episodes import ImageClasses
from datasets.errors import DataError
from datasets.image_files import Pixels, Source, cached_images, in_folder, in_zip, open_zip
from datasets.whole import written

COMPONENTS = {
    "omniglot": {
        "help": "1,623 handwritten characters, 20 drawings each",
        "attribute": "open_classes",
        "tasks": ("episodes", "batches"),
        "image_shape": (1, 28, 28),
        "ink": True,
        "reads": ("omniglot_split",),
    }
}

# A part of the data set (also the name of its archive and folder), to its number of characters.
PARTS = {"images_background": 964, "images_evaluation": 659}
DRAWINGS = 20
NAMES = 1056864713
"""The CRC-32 of all names, one a line: other alphabets would be in other splits."""

SPLITS: dict[str, dict[str, int]] = {
    "maml": {"train": 1100, "validation": 100, "test": 423},
    "mamlpp": {"train": 1150, "validation": 50, "test": 423},
    "vinyals": {"train": 1028, "validation": 172, "test": 423},
    "vinyals-trainval": {"train": 1200, "validation": 172, "test": 423},
}

# A constant of the project, not the run's --seed: all runs of a split share its test classes.
_SEED = 2017
_VINYALS_VALIDATION = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")

SIZE = (28, 28)


def open_classes(
    split: str, *, data_root: Path, omniglot_split: str = "maml", **_unused: object
) -> ImageClasses:
    """Return the characters of a split. Tasks rotate them as in the code of MAML or MAML++."""
    images, names = open_images(data_root)
    rows = split_classes(omniglot_split, split, names)
    rotate = omniglot_split != "mamlpp" or split == "train"
    of_split = np.array(names)[rows].tolist()
    return ImageClasses.of_equal_size(images, rows, rotate=rotate, names=of_split)


def split_classes(name: str, split: str, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the classes of a split: int64 ``[n]``, sorted rows of all ``names``.

    ``name`` is one of

    * ``maml``: 1,200 characters for training, 100 of them for validation, and 423 for test (Finn et
      al. 2017, arXiv:1703.03400). The authors' shuffle depends on the file system, so we use our
      own permutation.
    * ``mamlpp``: 1150 / 50 / 423 (Antoniou et al. 2019, arXiv:1810.09502), of the same permutation.
    * ``vinyals``: 1028 / 172 / 423 (Vinyals et al. 2016, arXiv:1606.04080, in the files published
      with Snell et al. 2017, arXiv:1703.05175): the last 423 are for test, and five alphabets for
      validation. There each rotation is its own class; here each task draws rotations.
    * ``vinyals-trainval``: the same, but training has 1,200 characters, including those for
      validation, as in the last training of Snell et al.'s released code.
    """
    if name not in SPLITS:
        raise DataError(f"--omniglot-split {name}: unknown; one of {', '.join(SPLITS)}")
    sizes = SPLITS[name]
    if name.startswith("vinyals"):
        test = np.arange(len(names) - sizes["test"], len(names))
        validation = np.flatnonzero([n.split("/")[0] in _VINYALS_VALIDATION for n in names])
        held_out = test if name.endswith("trainval") else np.concatenate([test, validation])
        train = np.setdiff1d(np.arange(len(names)), held_out)
    else:
        order = addresses.permutation(addresses.keys(_SEED, "omniglot", "split", 0), len(names))[0]
        # Test comes first: splits that differ only in validation then have the same test classes.
        test, validation, train = np.split(order, np.cumsum([sizes["test"], sizes["validation"]]))
    rows = {"train": train, "validation": validation, "test": test}[split]
    return np.sort(rows).astype(np.int64)


def open_images(data_root: Path) -> tuple[Mapped, list[str]]:
    """Map all drawings: uint8 ``[1623, 20, 28, 28]``, ink 255 on paper 0; and name the characters.

    A name is ``alphabet/characterNN``. They are sorted, those of images_background first.
    """
    folder = Path(data_root).expanduser() / "omniglot"
    parts = [find_part(_path(folder, part), n) for part, n in PARTS.items()]
    images = cached_images(
        "omniglot/28x28-grey-lanczos-inverted-1",  # raise the 1 when the decoder's output changes
        [source for source, _ in parts],
        (sum(PARTS.values()), DRAWINGS, *SIZE),
        title="decoding Omniglot",
    )
    names = [name for _, own in parts for name in own]
    if zlib.crc32("\n".join(names).encode()) != NAMES:
        raise DataError(f"{folder}: its alphabets are not Omniglot's; fetch the archives again")
    return images, names


def find_part(path: Path, characters: int) -> tuple[Source, list[str]]:
    """Return a part's source, a ``.zip`` or a folder of ``alphabet/characterNN/*.png``; its names.

    Archives are often packed again, so the names in the file are checked, and no checksum is.
    """
    archive = None if path.is_dir() else open_zip(path)
    pngs = (file.relative_to(path).as_posix() for file in path.rglob("*.png"))
    drawings = sorted(filter(_is_drawing, archive.namelist() if archive else pngs), key=_place)
    counts = Counter("/".join(_place(name)[:-1]) or name for name in drawings)
    wrong = [f"{name} has {n} drawings instead of {DRAWINGS}"
             for name, n in counts.items() if n != DRAWINGS]  # fmt: skip
    if len(counts) != characters:
        wrong.append(f"has {len(counts)} characters instead of {characters}")
    if wrong:
        raise DataError(f"{path}: {wrong[0]}; fetch the complete archive again")
    source = in_zip(archive, drawings, decode) if archive else in_folder(path, drawings, decode)
    return source, list(counts)


def _is_drawing(name: str) -> bool:
    """Return whether this is a PNG, and no resource fork or hidden file that an archiver added."""
    parts = PurePosixPath(name).parts
    return name.endswith(".png") and "__MACOSX" not in parts and not parts[-1].startswith(".")


def _place(name: str) -> tuple[str, ...]:
    return PurePosixPath(name).parts[-3:]


def decode(image: Image.Image) -> Pixels:
    """Convert a drawing to uint8 ``[28, 28]``, ink 255 on paper 0; ``ValueError`` for bad sizes."""
    if image.size != (105, 105):
        raise ValueError(f"{image.size[0]}x{image.size[1]} pixels instead of 105x105")
    # Convert to grey first, because the files are one-bit. On a one-bit image, Pillow's resize
    # silently falls back to nearest.
    grey = image.convert("L").resize(SIZE, Image.Resampling.LANCZOS)
    return np.uint8(255) - np.asarray(grey, dtype=np.uint8)


def _path(folder: Path, name: str) -> Path:
    """Return the archive or folder of a part; download a missing archive and check its MD5."""
    target = folder / f"{name}.zip"
    for path in (target, folder / name):
        if path.exists():
            return path
    from torchvision.datasets import Omniglot
    from torchvision.datasets.utils import download_url

    url = f"{Omniglot.download_url_prefix}/{target.name}"
    archives = f"images_background.zip and images_evaluation.zip into {folder}"
    with downloading(folder, f"{target}: not found", archives):
        if not target.exists():  # another process may have downloaded it by now
            print(f"downloading {url} to {target}", file=sys.stderr, flush=True)
            with written(target) as temporary:
                temporary.unlink()  # torchvision would check an existing file first
                download_url(url, folder, temporary.name, Omniglot.zips_md5[name])
    return target
