"""Omniglot: 1,623 handwritten characters, 20 drawings each (Lake et al., Science 2015)."""

import sys
from collections import Counter
from collections.abc import Mapping
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


DRAWINGS = 20

# A part of the data set (also the name of its archive and folder), to its alphabets with their
# numbers of characters: 964 characters of 30 alphabets, and 659 of 20.
_ALPHABETS = {
    "images_background": """
    Alphabet_of_the_Magi 20 Anglo-Saxon_Futhorc 29 Arcadian 26 Armenian 41
    Asomtavruli_(Georgian) 40 Balinese 24 Bengali 46
    Blackfoot_(Canadian_Aboriginal_Syllabics) 14 Braille 26 Burmese_(Myanmar) 34 Cyrillic 33
    Early_Aramaic 22 Futurama 26 Grantha 43 Greek 24 Gujarati 48 Hebrew 22
    Inuktitut_(Canadian_Aboriginal_Syllabics) 16 Japanese_(hiragana) 52
    Japanese_(katakana) 47 Korean 40 Latin 26 Malay_(Jawi_-_Arabic) 40
    Mkhedruli_(Georgian) 41 N_Ko 33 Ojibwe_(Canadian_Aboriginal_Syllabics) 14 Sanskrit 42
    Syriac_(Estrangelo) 23 Tagalog 17 Tifinagh 55
    """,
    "images_evaluation": """
    Angelic 20 Atemayar_Qelisayer 26 Atlantean 26 Aurek-Besh 26 Avesta 26 Ge_ez 26
    Glagolitic 45 Gurmukhi 45 Kannada 41 Keble 26 Malayalam 47 Manipuri 40 Mongolian 30
    Old_Church_Slavonic_(Cyrillic) 45 Oriya 46 Sylheti 28 Syriac_(Serto) 23 Tengwar 25
    Tibetan 42 ULOG 26
    """,
}
PARTS: dict[str, dict[str, int]] = {
    part: dict(zip(words[::2], map(int, words[1::2]), strict=True))
    for part, words in ((part, text.split()) for part, text in _ALPHABETS.items())
}

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
    classes = split_classes(omniglot_split, split)
    names = np.array(class_names())[classes].tolist()
    rotate = omniglot_split != "mamlpp" or split == "train"
    return ImageClasses.of_equal_size(open_images(data_root), classes, rotate=rotate, names=names)


def class_names() -> list[str]:
    """Return the classes as ``alphabet/characterNN``, in row order: background first."""
    return [
        f"{alphabet}/character{number:02d}"
        for alphabets in PARTS.values()
        for alphabet in sorted(alphabets)
        for number in range(1, alphabets[alphabet] + 1)
    ]


def split_classes(name: str, split: str) -> NDArray[np.int64]:
    """Return the classes of a split: int64 ``[n]``, sorted rows of the image array.

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
    sizes, names = SPLITS[name], class_names()
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


def open_images(data_root: Path) -> Mapped:
    """Map all drawings by :func:`class_names`: uint8 ``[1623, 20, 28, 28]``, ink 255 on paper 0."""
    folder = Path(data_root).expanduser() / "omniglot"
    return cached_images(
        "omniglot/28x28-grey-lanczos-inverted-1",  # raise the 1 when the decoder's output changes
        [find_part(_path(folder, name), alphabets) for name, alphabets in PARTS.items()],
        (len(class_names()), DRAWINGS, *SIZE),
        title="decoding Omniglot",
    )


def find_part(path: Path, alphabets: Mapping[str, int]) -> Source:
    """Return the source of a part, a ``.zip`` or a folder of ``alphabet/characterNN/*.png``."""
    # Archives are often packed again, so check the names in the file, not a checksum of the file.
    archive = None if path.is_dir() else open_zip(path)
    pngs = (file.relative_to(path).as_posix() for file in path.rglob("*.png"))
    drawings = sorted(filter(_is_drawing, archive.namelist() if archive else pngs), key=_place)
    characters = Counter("/".join(_place(name)[:-1]) or name for name in drawings)
    names = (f"{a}/character{i + 1:02d}" for a, n in alphabets.items() for i in range(n))
    expected = Counter(dict.fromkeys(names, DRAWINGS))
    if wrong := sorted((expected - characters).keys() | (characters - expected).keys()):
        found = f"{wrong[0]} has {characters[wrong[0]]} drawings instead of {expected[wrong[0]]}"
        raise DataError(f"{path}: {found}; fetch the complete archive again")
    return in_zip(archive, drawings, decode) if archive else in_folder(path, drawings, decode)


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
