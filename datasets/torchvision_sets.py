"""MNIST, Fashion-MNIST, CIFAR-10 and 100, SVHN, as torchvision finds and downloads them.

CIFAR-FS and FC100 are few-shot tasks of CIFAR-100, which the cache keeps by class, too.

torchvision looks for files under ``<data-root>/<name>``. It downloads files that are missing or do
not have the published MD5, but it trusts unpacked files of MNIST and Fashion-MNIST. Once the cache
has a decoded copy, the files are not needed any more. The validation split is a tenth of
torchvision's training part, a fixed draw that ignores classes.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from datasets import addresses
from datasets.batches import Examples
from datasets.cache import Mapped, cached
from datasets.downloads import downloading
from datasets.episodes import ImageClasses
from datasets.errors import DataError

COMPONENTS = {
    "mnist": {
        "help": "handwritten digits, ordinary classification",
        "attribute": "open_examples",
        "tasks": ("batches",),
        "image_shape": (1, 28, 28),
    },
    "fashion-mnist": {"like": "mnist", "help": "articles of clothing, ordinary classification"},
    "cifar10": {
        "help": "10 kinds of objects in colour, ordinary classification",
        "attribute": "open_examples",
        "tasks": ("batches",),
        "image_shape": (3, 32, 32),
    },
    "cifar100": {
        "like": "cifar10",
        "help": "100 kinds of objects in colour, ordinary classification",
    },
    "svhn": {"like": "cifar10", "help": "house numbers in colour, ordinary classification"},
    "cifarfs": {
        "help": "CIFAR-100 in colour, 600 images of each class, 64/16/20 classes",
        "attribute": "open_classes",
        "image_shape": (3, 32, 32),
    },
    "fc100": {
        "like": "cifarfs",
        "help": "CIFAR-100 in colour, 60/20/20 classes that have no superclass in common",
    },
}

# Constants of the project, not the run's --seed: every run validates on the same examples.
_SEED = 1998
_VALIDATION_SHARE = 10

Bytes: TypeAlias = NDArray[np.uint8]


class Source(NamedTuple):
    """torchvision's name of a data set, and the contents of the data set."""

    loader: str
    classes: int
    sizes: dict[str, int]
    shape: tuple[int, ...]


SOURCES: dict[str, Source] = {
    "mnist": Source("MNIST", 10, {"train": 60_000, "test": 10_000}, (28, 28)),
    "fashion-mnist": Source("FashionMNIST", 10, {"train": 60_000, "test": 10_000}, (28, 28)),
    "cifar10": Source("CIFAR10", 10, {"train": 50_000, "test": 10_000}, (32, 32, 3)),
    "cifar100": Source("CIFAR100", 100, {"train": 50_000, "test": 10_000}, (32, 32, 3)),
    "svhn": Source("SVHN", 10, {"train": 73_257, "test": 26_032}, (32, 32, 3)),
}


def open_examples(
    split: str, *, name: str, ways: int, data_root: Path, **_unused: object
) -> Examples:
    """Return the examples of a split of the data set ``name``, a key of ``SOURCES``."""
    if ways != (classes := SOURCES[name].classes):
        raise DataError(f"--ways {ways}: {name} has {classes} classes; give --ways {classes}")
    part = "test" if split == "test" else "train"
    images, labels = open_part(name, part, data_root)
    rows = split_rows(name, split, len(labels))
    return Examples(images.view(np.ndarray), rows, np.asarray(labels[rows], dtype=np.int64))


def split_rows(name: str, split: str, n: int) -> NDArray[np.int64]:
    """Return the rows of a split among the ``n`` rows of its part, sorted: int64."""
    if split == "test":
        return np.arange(n, dtype=np.int64)
    order = addresses.permutation(addresses.keys(_SEED, name, "validation", 0), n)[0]
    few = n // _VALIDATION_SHARE
    return np.sort(order[:few] if split == "validation" else order[few:])


def open_part(name: str, part: str, data_root: Path) -> tuple[Bytes, Bytes]:
    """Map torchvision's "train" or "test": images uint8 ``[n, H, W(, 3)]``, labels ``[n]``."""
    source = SOURCES[name]
    n, values = source.sizes[part], math.prod(source.shape)

    def rows() -> Iterator[Bytes]:
        images, labels = read_part(name, part, data_root)
        yield np.column_stack([images.reshape(n, values), labels])

    # v2: raise it when the decoder's output changes.
    title = f"reading {name} ({part})"
    table = cached(f"{name}/v2-{part}.npy", (n, values + 1), rows, title)
    return table[:, :values].reshape(n, *source.shape), table[:, values]


def read_part(name: str, part: str, data_root: Path) -> tuple[Bytes, Bytes]:
    """Read what :func:`open_part` caches; download missing files. Many processes may call this."""
    # Import late: torchvision is heavy, and a cached copy does not need it.
    from torchvision import datasets as torchvision_datasets

    source, folder = SOURCES[name], Path(data_root).expanduser() / name
    svhn = source.loader == "SVHN"
    which = {"split": part} if svhn else {"train": part == "train"}
    below = folder if len(source.shape) == 3 else folder / source.loader / "raw"
    missing = f"{folder}: {name} is missing or damaged there"
    with downloading(folder, missing, f"the published files, packed, into {below}"):
        loaded = getattr(torchvision_datasets, source.loader)(folder, **which, download=True)
        images = loaded.data.transpose(0, 2, 3, 1) if svhn else np.asarray(loaded.data)
        labels = np.asarray(loaded.labels if svhn else loaded.targets)
        if images.shape != (source.sizes[part], *source.shape) or len(labels) != len(images):
            raise ValueError(f"{list(images.shape)} images and {len(labels)} labels")
        return np.ascontiguousarray(images, dtype=np.uint8), labels.astype(np.uint8)


# ---- CIFAR-FS and FC100 -----------------------------------------------------------------------

# In the order of their labels.
_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain "
    "mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain "
    "plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone "
    "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
CLASSES = _NAMES.split()
# All other classes are for training.
HELD_OUT: dict[str, dict[str, str]] = {
    # Bertinetto et al. 2019, arXiv:1805.08136, the files splits/bertinetto/*.txt.
    "cifarfs": {
        "validation": "beaver beetle butterfly camel cattle crab crocodile flatfish lamp "
        "maple_tree motorcycle otter sea shark television tractor",
        "test": "baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy rocket rose "
        "snail sweet_pepper table telephone wardrobe whale woman worm",
    },
    # Oreshkin et al. 2018, arXiv:1805.10123, supplementary material: four superclasses each.
    "fc100": {
        "validation": "bear leopard lion tiger wolf camel cattle chimpanzee elephant kangaroo "
        "crab lobster snail spider worm hamster mouse rabbit shrew squirrel",
        "test": "beaver dolphin otter seal whale bee beetle butterfly caterpillar "
        "cockroach fox porcupine possum raccoon skunk baby boy girl man woman",
    },
}


def labels(name: str, split: str) -> NDArray[np.int64]:
    """Return CIFAR-100's labels of a split of "cifarfs" or "fc100", sorted: int64 ``[c]``."""
    held_out = {part: frozenset(text.split()) for part, text in HELD_OUT[name].items()}
    of_split = held_out.get(split, {*CLASSES}.difference(*held_out.values()))
    return np.array([label for label, name in enumerate(CLASSES) if name in of_split])


def open_classes(split: str, *, name: str, data_root: Path, **_unused: object) -> ImageClasses:
    """Return the classes of a split of "cifarfs" or "fc100", in order of names, not rotated."""
    rows = labels(name, split)
    names = [CLASSES[label] for label in rows]
    return ImageClasses.of_equal_size(open_images(data_root), rows, rotate=False, names=names)


def open_images(data_root: Path) -> Mapped:
    """Map CIFAR-100 by class, training images first: uint8 ``[100, 600, 32, 32, 3]``, read-only."""
    source = SOURCES["cifar100"]
    shape = (source.classes, sum(source.sizes.values()) // source.classes, *source.shape)

    def by_class() -> Iterator[Bytes]:
        parts = [read_part("cifar100", part, data_root) for part in ("train", "test")]
        images, of_class = (np.concatenate(both) for both in zip(*parts, strict=True))
        yield images[np.argsort(of_class, kind="stable")].reshape(shape)

    # v1: raise it when the order of the images changes.
    return cached("cifar100/v1-by-class.npy", shape, by_class, "reading CIFAR-100 by class")
