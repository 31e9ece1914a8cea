"""MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and SVHN, as torchvision finds and downloads them.

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
from datasets.cache import cached
from datasets.downloads import downloading
from datasets.errors import DataError

COMPONENTS = {
    "mnist": {
        "help": "handwritten digits, ordinary classification",
        "examples": "open_examples",
        "image_shape": (1, 28, 28),
    },
    "fashion-mnist": {"like": "mnist", "help": "articles of clothing, ordinary classification"},
    "cifar10": {
        "help": "10 kinds of objects in colour, ordinary classification",
        "examples": "open_examples",
        "image_shape": (3, 32, 32),
    },
    "cifar100": {
        "like": "cifar10",
        "help": "100 kinds of objects in colour, ordinary classification",
    },
    "svhn": {"like": "cifar10", "help": "house numbers in colour, ordinary classification"},
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
    found = cached(f"{name}/v2-{part}.npy", (n, values + 1), rows, title)
    return found[:, :values].reshape(n, *source.shape), found[:, values]


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
        found = getattr(torchvision_datasets, source.loader)(folder, **which, download=True)
        images = found.data.transpose(0, 2, 3, 1) if svhn else np.asarray(found.data)
        labels = np.asarray(found.labels if svhn else found.targets)
        if images.shape != (source.sizes[part], *source.shape) or len(labels) != len(images):
            raise ValueError(f"{list(images.shape)} images and {len(labels)} labels")
        return np.ascontiguousarray(images, dtype=np.uint8), labels.astype(np.uint8)
