"""MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and SVHN, as torchvision finds and downloads them.

Locate, verify, decode once, map: files that are missing under ``<data-root>/<name>``, or whose
MD5 is not the published one, are downloaded there; a decoded copy in the cache is what every
process maps, and once it exists the files are not asked for again.

Validation is a tenth of torchvision's training part, drawn once and for all without regard to
class; test is torchvision's test part.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datasets import addresses
from datasets.batches import Examples
from datasets.cache import Mapped, cached
from datasets.downloads import FAILURES, downloading
from datasets.errors import DataError

COMPONENTS = {
    "mnist": {
        "help": "handwritten digits, ordinary classification",
        "examples": "open_examples",
        "image_shape": (1, 28, 28),
    },
    "fashion-mnist": {
        "like": "mnist",
        "help": "articles of clothing, ordinary classification",
    },
    "cifar10": {
        "help": "10 kinds of objects in colour, ordinary classification",
        "examples": "open_examples",
        "image_shape": (3, 32, 32),
    },
    "cifar100": {
        "like": "cifar10",
        "help": "100 kinds of objects in colour, ordinary classification",
    },
    "svhn": {
        "like": "cifar10",
        "help": "house numbers in colour, ordinary classification",
    },
}

# Constants of the project, not the run's --seed: every run validates on the same examples.
_SEED = 1998
_VALIDATION_SHARE = 10

# Part of the cache's file names: raise it when the decoder's output changes.
_DECODER = "v1"


class Source(NamedTuple):
    """What torchvision calls a data set, and what is in it."""

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
    """The examples of a split of the data set ``name``, a key of ``SOURCES``.

    Raises :class:`DataError` if ``ways`` is not its number of classes, and as :func:`open_part`.
    """
    source = SOURCES[name]
    if split not in ("train", "validation", "test"):
        raise DataError(f"--split {split}: unknown; one of train, validation, test")
    if ways != source.classes:
        raise DataError(
            f"--ways {ways}: {name} has {source.classes} classes; give --ways {source.classes}"
        )
    part = "test" if split == "test" else "train"
    images, labels = open_part(name, part, data_root)
    rows = split_rows(name, split, len(labels))
    return Examples(images.view(np.ndarray), rows, np.asarray(labels[rows], dtype=np.int64))


def split_rows(name: str, split: str, n: int) -> NDArray[np.int64]:
    """The rows of a split among the ``n`` of its part, sorted: int64."""
    if split == "test":
        return np.arange(n, dtype=np.int64)
    order = addresses.permutation(addresses.keys(_SEED, name, "validation", 0), n)[0]
    few = n // _VALIDATION_SHARE
    return np.sort(order[:few] if split == "validation" else order[few:])


def open_part(name: str, part: str, data_root: Path) -> tuple[Mapped, Mapped]:
    """Torchvision's ``part``, "train" or "test": images and labels, read-only, in its order.

    uint8 ``[n, H, W]`` or ``[n, H, W, 3]``, and uint8 ``[n]``. Raises :class:`DataError`, in one
    line, if the files are missing or damaged and cannot be downloaded.
    """
    source = SOURCES[name]
    n = source.sizes[part]
    folder = Path(data_root).expanduser() / name
    # Both arrays are read at once, and only if one is not in the cache.
    read = functools.cache(lambda: read_part(name, part, folder))
    prefix = f"{name}/{_DECODER}-{part}"
    return (
        cached(
            f"{prefix}-images.npy",
            (n, *source.shape),
            lambda: iter([read()[0]]),
            title=f"reading {name} ({part})",
        ),
        cached(f"{prefix}-labels.npy", (n,), lambda: iter([read()[1]])),
    )


def read_part(name: str, part: str, folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """What :func:`open_part` keeps, read from ``folder`` each time, downloading what is missing.

    Many processes may call. Raises :class:`DataError` as that does.
    """
    # Imported late: it is heavy, and the cache needs none of it.
    from torchvision import datasets as torchvision_datasets

    source = SOURCES[name]
    kind = getattr(torchvision_datasets, source.loader)
    files = {"CIFA": _cifar, "SVHN": _svhn}.get(source.loader[:4], _idx)(kind, part, folder)
    try:
        if files.wrong():
            with downloading(folder, folder / ".download.lock"):
                files.fetch()
        images, labels = files.read()
        if images.shape != (source.sizes[part], *source.shape) or len(labels) != len(images):
            raise ValueError(f"{list(images.shape)} images and {len(labels)} labels")
        return np.ascontiguousarray(images, dtype=np.uint8), labels.astype(np.uint8)
    except FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        wrong = files.wrong()
        if not wrong:
            raise DataError(f"{folder}: cannot be read as {name} ({reason})") from error
        raise DataError(
            f"{wrong}, and the download failed ({reason}); put {' and '.join(files.archives)} into "
            f"{files.where}, or point --data-root or $MAML_DATA at a folder that has {name}/, or "
            "connect this machine to the network so that it downloads; the supervised-glyphs-* "
            "presets need no data"
        ) from error


class _Files(NamedTuple):
    """The files of one part of a data set.

    * ``checked``: every file that is read, with its published MD5
    * ``where``, ``archives``: the folder where a user may put files of these names
    * ``fetch``: gets what is missing or damaged
    * ``read``: images, channels last, and labels
    """

    checked: list[tuple[Path, str]]
    where: Path
    archives: list[str]
    fetch: Callable[[], object]
    read: Callable[[], tuple[NDArray[np.uint8], NDArray[np.int64]]]

    def wrong(self) -> str:
        """Say of the first file that is not in order what it is, and why not; "" if all are."""
        from torchvision.datasets.utils import check_integrity

        for path, md5 in self.checked:
            if not path.is_file():
                return f"{path}: not found"
            if not check_integrity(path, md5):
                return f"{path}: damaged (not of the published MD5)"
        return ""


def _idx(kind: Any, part: str, folder: Path) -> _Files:
    """MNIST's four compressed files.

    torchvision checks the MD5 of downloads only, not of what it finds extracted: read here are the
    archives themselves.
    """
    from torchvision.datasets.mnist import read_image_file, read_label_file
    from torchvision.datasets.utils import download_url, extract_archive

    where = folder / kind.__name__ / "raw"
    prefix = "t10k" if part == "test" else "train"
    resources = sorted(kind.resources)
    checked = [(where / name, md5) for name, md5 in resources if name.startswith(prefix)]

    def fetch() -> None:
        for path, md5 in checked:
            for number, mirror in enumerate(kind.mirrors, start=1):
                try:
                    download_url(f"{mirror}{path.name}", where, path.name, md5)
                    break
                except FAILURES:
                    if number == len(kind.mirrors):
                        raise

    def read() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        with tempfile.TemporaryDirectory() as scratch:
            for path, _ in checked:
                extract_archive(path, scratch)
            images, labels = (Path(scratch) / path.stem for path, _ in checked)
            return read_image_file(images).numpy(), read_label_file(labels).numpy()

    return _Files(checked, where, [name for name, _ in resources], fetch, read)


def _cifar(kind: Any, part: str, folder: Path) -> _Files:
    """CIFAR's archive, extracted: pickles, which torchvision opens once their MD5 is right."""
    extracted = folder / kind.base_folder
    checked = [(folder / kind.filename, kind.tgz_md5)]
    if extracted.is_dir():
        listed = [*kind.train_list, *kind.test_list, [kind.meta["filename"], kind.meta["md5"]]]
        checked = [(extracted / name, md5) for name, md5 in listed]

    def read() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        # Where there is an archive alone, it is extracted now.
        found = kind(folder, train=part == "train", download=True)
        return found.data, np.asarray(found.targets)

    return _Files(checked, folder, [kind.filename], read, read)


def _svhn(kind: Any, part: str, folder: Path) -> _Files:
    """SVHN's MATLAB file of the part."""
    _, name, md5 = kind.split_list[part]

    def read() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        found = kind(folder, split=part, download=True)
        return found.data.transpose(0, 2, 3, 1), found.labels

    archives = [kind.split_list[each][1] for each in ("train", "test")]
    return _Files([(folder / name, md5)], folder, archives, read, read)
