"""torchvision's data sets in miniature, and a web of downloads."""

import hashlib
import io
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import datasets as torchvision_datasets

from datasets import torchvision_sets

SIZES = {"train": 60, "test": 20}


class Tiny:
    """A miniature of one data set, in place of torchvision's class.

    Attributes:
        images: Part to uint8 ``[n, H, W]`` or ``[n, H, W, 3]``.
        labels: Part to ``[n]``.
        folder: Where its files are; None: nowhere.
    """

    def __init__(self, name: str, sizes: dict[str, int] = SIZES) -> None:
        source = torchvision_sets.SOURCES[name]._replace(sizes=sizes)
        rng = np.random.default_rng(len(name))
        self.name, self.source, self.folder = name, source, Path("nowhere")
        self.images = {
            part: rng.integers(0, 256, (n, *source.shape), dtype=np.uint8)
            for part, n in sizes.items()
        }
        self.labels = {part: np.arange(n) % source.classes for part, n in sizes.items()}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torchvision_datasets, self.source.loader, self._loaded)
        monkeypatch.setitem(torchvision_sets.SOURCES, self.name, self.source)

    def write(self, data_root: Path) -> None:
        self.folder = data_root / self.name

    def _loaded(
        self, folder: Path, *, download: bool, train: bool = False, split: str | None = None
    ) -> Any:
        """What torchvision makes of the files, in its words."""
        assert download and folder.is_dir()
        if folder != self.folder:
            raise RuntimeError("Dataset not found or corrupted.")
        part = split or ("train" if train else "test")
        images, labels = self.images[part], self.labels[part]
        if self.source.loader == "SVHN":
            return SimpleNamespace(data=images.transpose(0, 3, 1, 2), labels=labels)
        if images.ndim == 3:
            return SimpleNamespace(data=torch.from_numpy(images), targets=torch.from_numpy(labels))
        return SimpleNamespace(data=images, targets=labels.tolist())


class Web:
    """What downloads find in place of the network: files by name, or nothing.

    Attributes:
        files: Name of a file to content.
        down: Beginnings of addresses that do not answer.
        asked: The addresses that were asked for, in order.
    """

    def __init__(self, files: dict[str, bytes] | None = None, down: tuple[str, ...] = ()) -> None:
        self.files = {Path(name).name: content for name, content in (files or {}).items()}
        self.down = down
        self.asked: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer every request of ``urllib``."""
        monkeypatch.setattr(urllib.request, "urlopen", self._open)

    def _open(self, request: urllib.request.Request, *_: object, **__: object) -> Any:
        url = request.full_url
        self.asked.append(url)
        name = url.rsplit("/", 1)[-1]
        if url.startswith(self.down) or name not in self.files:
            raise urllib.error.URLError("Network is unreachable")
        response: Any = _Response(self.files[name])
        response.url, response.length = url, len(self.files[name])
        return response


class _Response(io.BytesIO):
    url: str
    length: int


def md5(content: bytes) -> str:
    """The checksum that is published."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
