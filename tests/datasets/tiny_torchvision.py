"""torchvision's data sets in miniature, packed as the real ones, with checksums to match."""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
from torchvision import datasets as torchvision_datasets

from datasets import torchvision_sets

SIZES = {"train": 60, "test": 20}


class Tiny:
    """A miniature in place of a published data set; ``files`` are its downloads."""

    def __init__(self, name: str, patch: pytest.MonkeyPatch, sizes: dict[str, int] = SIZES) -> None:
        source = torchvision_sets.SOURCES[name]._replace(sizes=sizes)
        rng = np.random.default_rng(len(name))
        self.name, self.source = name, source
        self.images = {
            part: rng.integers(0, 256, (n, *source.shape), dtype=np.uint8)
            for part, n in sizes.items()
        }
        self.labels = {part: np.arange(n) % source.classes for part, n in sizes.items()}
        self.changes: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        if len(source.shape) == 2:
            self._idx()
        elif source.loader == "SVHN":
            self._svhn()
        else:
            self._cifar()
        kind = getattr(torchvision_datasets, source.loader)
        for attribute, value in self.changes.items():
            patch.setattr(kind, attribute, value)
        patch.setitem(torchvision_sets.SOURCES, name, source)

    def _idx(self) -> None:
        resources = []
        for part, prefix in (("train", "train"), ("test", "t10k")):
            images, labels = self.images[part], self.labels[part].astype(np.uint8)
            for name, header, data in (
                ("images-idx3", struct.pack(">4i", 0x803, *images.shape), images),
                ("labels-idx1", struct.pack(">2i", 0x801, len(labels)), labels),
            ):
                packed = gzip.compress(header + data.tobytes(), mtime=0)
                file = f"{prefix}-{name}-ubyte.gz"
                self.files[f"{self.source.loader}/raw/{file}"] = packed
                resources.append((file, md5(packed)))
        self.changes = {"resources": resources}

    def _cifar(self) -> None:
        kind = getattr(torchvision_datasets, self.source.loader)
        key = "fine_labels" if self.source.classes == 100 else "labels"
        content = {}
        for part, listed in (("train", kind.train_list), ("test", kind.test_list)):
            flat = self.images[part].transpose(0, 3, 1, 2).reshape(len(self.images[part]), -1)
            shares = np.array_split(np.arange(len(flat)), len(listed))
            for (file, _), rows in zip(listed, shares, strict=True):
                entry = {"data": flat[rows], key: self.labels[part][rows].tolist()}
                content[file] = pickle.dumps(entry)
        content[kind.meta["filename"]] = pickle.dumps({kind.meta["key"]: ["a", "b"]})
        members = {f"{kind.base_folder}/{file}": data for file, data in content.items()}
        packed = packed_tar(members, "w:gz")
        self.files[kind.filename] = packed
        self.changes = {
            "tgz_md5": md5(packed),
            "train_list": [[file, md5(content[file])] for file, _ in kind.train_list],
            "test_list": [[file, md5(content[file])] for file, _ in kind.test_list],
            "meta": kind.meta | {"md5": md5(content[kind.meta["filename"]])},
        }

    def _svhn(self) -> None:
        splits = dict(torchvision_datasets.SVHN.split_list)
        for part in SIZES:
            url, file, _ = splits[part]
            content = io.BytesIO()
            labels = np.where(self.labels[part] == 0, 10, self.labels[part])
            images = self.images[part].transpose(1, 2, 3, 0)
            scipy.io.savemat(content, {"X": images, "y": labels[:, None].astype(np.uint8)})
            self.files[file] = content.getvalue()
            splits[part] = [url, file, md5(content.getvalue())]
        self.changes = {"split_list": splits}

    def write(self, data_root: Path) -> None:
        write_files(data_root / self.name, self.files)


class Web:
    """Replace the network: downloads find these files by name, and nothing else."""

    def __init__(self, files: dict[str, bytes], patch: pytest.MonkeyPatch) -> None:
        self.files = {Path(name).name: content for name, content in files.items()}
        self.asked: list[str] = []
        patch.setattr(urllib.request, "urlopen", self._open)

    def _open(self, request: urllib.request.Request, *_: object, **__: object) -> Any:
        url = request.full_url
        self.asked.append(url)
        name = url.rsplit("/", 1)[-1]
        if name not in self.files:
            raise urllib.error.URLError("Network is unreachable")
        response: Any = io.BytesIO(self.files[name])
        response.url, response.length = url, len(self.files[name])
        return response


def packed_tar(contents: dict[str, bytes], mode: Any, **options: Any) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode=mode, **options) as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return archive.getvalue()


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
