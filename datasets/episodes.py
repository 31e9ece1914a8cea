"""Stateless samplers: a task is a pure function of (seed, split, id)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datasets import addresses
from datasets.errors import DataError
from datasets.tasks import Task


class Episodes(ABC):
    """An endless, addressable stream of tasks of one split.

    There is no sampler state: nothing to checkpoint, nothing to shard. Whoever holds an id can make
    the task, so ids travel between processes and images do not.
    """

    split: str
    # Tasks after which the same examples come again; None: they never do.
    one_pass: int | None = None

    def ids(self, iteration: int, meta_batch_size: int) -> Tensor:
        """The task ids of a meta-batch: int64 ``[B]``, ``iteration * B + (0, ..., B - 1)``."""
        first = iteration * meta_batch_size
        return torch.arange(first, first + meta_batch_size, dtype=torch.int64)

    def following(self, ids: Tensor, iterations: int) -> Tensor:
        """The ids of the meta-batch ``iterations`` after the one with these ids (``[B]``)."""
        return ids + iterations * len(ids)

    @abstractmethod
    def tasks(self, ids: Tensor) -> Task:
        """The tasks with these ids (int64 ``[B]``), batched, on the CPU.

        Pure: a task is the same alone or in a batch, in any order, in any process.
        """


class ImageArray(Protocol):
    """Images as :class:`FewShotImages` and :class:`datasets.batches.Batches` need them.

    They are uint8, ``[classes, drawings, H, W]`` or ``[classes, drawings, H, W, 3]``, or for
    batches ``[n, H, W]`` or ``[n, H, W, 3]``.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all dimensions."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Advanced indexing with integer arrays, as numpy's."""
        ...


class ImageClasses(NamedTuple):
    """What a data set of images gives to few-shot tasks of a split.

    * ``images``: uint8 ``[classes, drawings, H, W]`` or ``[classes, drawings, H, W, 3]``, usually
      memory-mapped
    * ``classes``: int64 ``[n]``, the rows of ``images`` that belong to the split
    * ``rotate``: whether each class of each task is turned by its own random multiple of 90 degrees
      (Santoro et al. 2016, as in MAML's released code)
    """

    images: ImageArray
    classes: NDArray[np.int64]
    rotate: bool


class Layout(NamedTuple):
    """What ``B`` image tasks consist of, before any image is read; all int64.

    * ``classes``: ``[B, N]``, rows of the image array; position in the task is the label
    * ``drawings``: ``[B, N, K+Q]``, columns of the image array, distinct in a class; the first
      ``K`` are the support
    * ``quarter_turns``: ``[B, N]``, counter-clockwise multiples of 90 degrees
    """

    classes: NDArray[np.int64]
    drawings: NDArray[np.int64]
    quarter_turns: NDArray[np.int64]


class FewShotImages(Episodes):
    """N-way K-shot classification of images (Vinyals et al. 2016, arXiv:1606.04080).

    A task draws ``ways`` distinct classes, in random order, and ``shots + queries`` distinct images
    of each.
    """

    def __init__(
        self,
        *,
        images: ImageArray,
        classes: NDArray[np.int64],
        split: str,
        ways: int,
        shots: int,
        queries: int,
        seed: int,
        rotate: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Check the request against the data; reads no image.

        ``images``, ``classes`` and ``rotate`` are as in :class:`ImageClasses`.

        Raises :class:`DataError`, naming the flag, if the split is too small for the task.
        """
        for flag, value in (("--ways", ways), ("--shots", shots), ("--queries", queries)):
            if value < 1:
                raise DataError(f"{flag} {value}: must be at least 1")
        if len(images.shape) not in (4, 5):
            raise ValueError(f"images must be [classes, drawings, H, W(, 3)], not {images.shape}")
        if rotate and images.shape[2] != images.shape[3]:
            raise ValueError(f"only square images can turn by 90 degrees, not {images.shape[2:4]}")
        if ways > len(classes):
            raise DataError(f"--ways {ways}: the {split} split has only {len(classes)} classes")
        if shots + queries > images.shape[1]:
            raise DataError(
                f"--shots {shots} and --queries {queries}: they need {shots + queries} images of a "
                f"class, and the {split} split has {images.shape[1]}"
            )
        self.split = split
        self.classes = np.asarray(classes, dtype=np.int64)
        self.ways, self.shots, self.queries = ways, shots, queries
        self.seed, self.rotate, self.dtype = seed, rotate, dtype
        # A plain view of the same pages: the memmap subclass makes every small operation slower.
        self._images: ImageArray = (
            images.view(np.ndarray) if isinstance(images, np.memmap) else images
        )

    def layout(self, ids: Tensor) -> Layout:
        """The composition of the tasks with these ids (int64 ``[B]``). Touches no image."""
        index = ids.detach().cpu().numpy()
        per_class = self.shots + self.queries

        def keys(purpose: str) -> addresses.Keys:
            return addresses.keys(self.seed, self.split, purpose, index)

        rows = addresses.choose(keys("classes"), len(self.classes), self.ways)
        drawing_keys = addresses.derive(keys("drawings"), self.ways)
        drawings = addresses.choose(drawing_keys, self._images.shape[1], per_class)
        if self.rotate:
            turns = addresses.integers(keys("rotation"), 4, self.ways)
        else:
            turns = np.zeros((len(index), self.ways), dtype=np.int64)
        return Layout(self.classes[rows], drawings, turns)

    def tasks(self, ids: Tensor) -> Task:
        """The tasks with these ids (int64 ``[B]``): images ``[B, N*K, C, H, W]`` in [0, 1]."""
        layout = self.layout(ids)
        pixels = np.asarray(self._images[layout.classes[:, :, None], layout.drawings])
        if self.rotate:
            for turns in (1, 2, 3):
                turned = layout.quarter_turns == turns
                pixels[turned] = np.rot90(pixels[turned], turns, axes=(2, 3))
        return Task(
            self._scaled(pixels[:, :, : self.shots]),
            self._labels(len(pixels), self.shots),
            self._scaled(pixels[:, :, self.shots :]),
            self._labels(len(pixels), self.queries),
        )

    def _scaled(self, pixels: NDArray[np.uint8]) -> Tensor:
        """uint8 ``[B, N, n, H, W]`` (or ``[..., 3]``) to float ``[B, N*n, C, H, W]`` in [0, 1]."""
        batch, ways, n, *image = pixels.shape
        return scaled(pixels.reshape(batch, ways * n, *image), self.dtype)

    def _labels(self, batch: int, per_class: int) -> Tensor:
        """Labels in class-major order: int64 ``[B, N*per_class]``."""
        return torch.arange(self.ways).repeat_interleave(per_class).repeat(batch, 1)


def scaled(pixels: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """uint8 ``[B, E, H, W]`` or ``[B, E, H, W, 3]`` to ``dtype [B, E, C, H, W]`` in [0, 1]."""
    first = np.moveaxis(pixels, -1, 2) if pixels.ndim == 5 else pixels[:, :, None]
    return torch.from_numpy(np.ascontiguousarray(first)).to(dtype).div_(255)
