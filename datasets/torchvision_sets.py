"""MNIST, Fashion-MNIST, CIFAR-10, CIFAR-100 and SVHN, as torchvision finds and downloads them.

Locate, verify, decode once, map: files that are missing under ``<data-root>/<name>``, or whose
MD5 is not the published one, are downloaded there; a decoded copy in the cache is what every
process maps, and once it exists the files are not asked for again.

Validation is a tenth of torchvision's training part, drawn once and for all without regard to
class; test is torchvision's test part.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import socket
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datasets import addresses
from datasets.batches import Examples
from datasets.cache import Mapped, cached
from datasets.errors import DataError
from datasets.paths import to_download_into

COMPONENTS = {
    "mnist": {
        "help": "handwritten digits, ordinary classification",
        "examples": "open_examples",
        "image_shape": (1, 28, 28),
    },
    "fashion-mnist": {
        "help": "articles of clothing, ordinary classification",
        "examples": "open_examples",
        "image_shape": (1, 28, 28),
    },
    "cifar10": {
        "help": "10 kinds of objects in colour, ordinary classification",
        "examples": "open_examples",
        "image_shape": (3, 32, 32),
    },
    "cifar100": {
        "help": "100 kinds of objects in colour, ordinary classification",
        "examples": "open_examples",
        "image_shape": (3, 32, 32),
    },
    "svhn": {
        "help": "house numbers in colour, ordinary classification",
        "examples": "open_examples",
        "image_shape": (3, 32, 32),
    },
}

# Constants of the project, not the run's --seed: every run validates on the same examples.
_SEED = 1998
_VALIDATION_SHARE = 10

# Part of the cache's file names: raise it when the decoder's output changes.
_DECODER = "v1"
_DOWNLOAD_TIMEOUT_S = 30.0

# What a failed download or unreadable bytes raise.
_FAILURES = (
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    http.client.HTTPException,
    tarfile.TarError,
    zlib.error,
)


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
    files = _files(kind, part, folder)
    try:
        if any(files.state(path, md5) for path, md5 in files.checked):
            with to_download_into(folder, folder / ".download.lock"), _impatient():
                files.download()
        images, labels = files.read()
        if images.shape != (source.sizes[part], *source.shape) or len(labels) != len(images):
            raise ValueError(f"{list(images.shape)} images and {len(labels)} labels")
        return np.ascontiguousarray(images, dtype=np.uint8), labels.astype(np.uint8)
    except _FAILURES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        states = ((path, files.state(path, md5)) for path, md5 in files.checked)
        wrong = next(((path, state) for path, state in states if state), None)
        if wrong is None:
            raise DataError(f"{folder}: cannot be read as {name} ({reason})") from error
        archives = " and ".join(files.archives)
        raise DataError(
            f"{wrong[0]}: {wrong[1]}, and the download failed ({reason}); put {archives} into "
            f"{files.where}, or point --data-root or $MAML_DATA at a folder that has {name}/, or "
            "connect this machine to the network so that it downloads; the supervised-glyphs-* "
            "presets need no data"
        ) from error


class _Files:
    """The files of one part of a data set.

    Attributes:
        checked: Every file that is read, with its published MD5.
        archives: The names of what a user may put into ``where``.
    """

    checked: list[tuple[Path, str]]
    archives: list[str]
    where: Path

    def __init__(self, kind: Any, part: str, folder: Path) -> None:
        self.kind, self.part, self.folder = kind, part, folder

    def state(self, path: Path, md5: str) -> str:
        """What is wrong with a file, or nothing."""
        from torchvision.datasets.utils import check_integrity

        if not path.is_file():
            return "not found"
        return "" if check_integrity(path, md5) else "damaged (not of the published MD5)"

    def download(self) -> None:
        """Fetch what is missing or damaged."""
        raise NotImplementedError

    def read(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Images, channels last, and labels."""
        raise NotImplementedError


class _Idx(_Files):
    """MNIST's four compressed files.

    torchvision checks the MD5 of downloads only, not of what it finds extracted: read here are the
    archives themselves.
    """

    def __init__(self, kind: Any, part: str, folder: Path) -> None:
        super().__init__(kind, part, folder)
        self.where = folder / kind.__name__ / "raw"
        prefix = "t10k" if part == "test" else "train"
        found = [(name, md5) for name, md5 in kind.resources if name.startswith(prefix)]
        self.checked = [(self.where / name, md5) for name, md5 in sorted(found)]
        self.archives = [name for name, _ in sorted(kind.resources)]

    def download(self) -> None:
        from torchvision.datasets.utils import download_url

        for path, md5 in self.checked:
            for last, mirror in enumerate(self.kind.mirrors, start=1):
                try:
                    download_url(f"{mirror}{path.name}", self.where, path.name, md5)
                except _FAILURES:
                    if last == len(self.kind.mirrors):
                        raise
                else:
                    break

    def read(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        from torchvision.datasets.mnist import read_image_file, read_label_file
        from torchvision.datasets.utils import extract_archive

        with tempfile.TemporaryDirectory() as scratch:
            for path, _ in self.checked:
                extract_archive(path, scratch)
            images, labels = (Path(scratch) / path.stem for path, _ in self.checked)
            return read_image_file(images).numpy(), read_label_file(labels).numpy()


class _Cifar(_Files):
    """CIFAR's archive, extracted: pickles, which torchvision opens once their MD5 is right."""

    def __init__(self, kind: Any, part: str, folder: Path) -> None:
        super().__init__(kind, part, folder)
        self.where = folder
        self.archives = [kind.filename]
        extracted = folder / kind.base_folder
        if extracted.is_dir():
            listed = [*kind.train_list, *kind.test_list, [kind.meta["filename"], kind.meta["md5"]]]
            self.checked = [(extracted / name, md5) for name, md5 in listed]
        else:
            self.checked = [(folder / kind.filename, kind.tgz_md5)]

    def download(self) -> None:
        self.kind(self.folder, train=True, download=True)

    def read(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        # Where there is an archive alone, it is extracted now.
        found = self.kind(self.folder, train=self.part == "train", download=True)
        return found.data, np.asarray(found.targets)


class _Svhn(_Files):
    """SVHN's MATLAB file of the part."""

    def __init__(self, kind: Any, part: str, folder: Path) -> None:
        super().__init__(kind, part, folder)
        self.where = folder
        _, name, md5 = kind.split_list[part]
        self.checked = [(folder / name, md5)]
        self.archives = [kind.split_list[each][1] for each in ("train", "test")]

    def download(self) -> None:
        self.kind(self.folder, split=self.part, download=True)

    def read(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        found = self.kind(self.folder, split=self.part)
        return found.data.transpose(0, 2, 3, 1), found.labels


def _files(kind: Any, part: str, folder: Path) -> _Files:
    of_kind = {"CIFAR10": _Cifar, "CIFAR100": _Cifar, "SVHN": _Svhn}
    return of_kind.get(kind.__name__, _Idx)(kind, part, folder)


@contextlib.contextmanager
def _impatient() -> Iterator[None]:
    """Let no download wait for ever: torchvision's have no time limit of their own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
