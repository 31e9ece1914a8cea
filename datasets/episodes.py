"""Stateless samplers: a task is a pure function of (seed, split, id)."""

from __future__ import annotations

import copy
import hashlib
import itertools
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets import accelerator, addresses
from datasets.errors import DataError
from datasets.tasks import Task
from datasets.words import counted

SPLITS = ("train", "validation", "test")

HELD = 2**32
"""Bytes of images that may stay on a device."""


def check_counts(**counts: int) -> None:
    """Raise :class:`DataError` for a count below 1, and name its flag."""
    for name, count in counts.items():
        if count < 1:
            raise DataError(f"--{name} {count}: must be at least 1")


class Episodes(ABC):
    """An endless, addressable stream of tasks of one split, without any state.

    Any process can make a task from its id, so ids travel between processes and images do not.
    """

    split: str
    # The number of tasks after which the examples repeat; None: they never repeat.
    one_pass: int | None = None
    # A digest of the split's class names, if the user determines the classes; else None.
    division: str | None = None
    # The names of the classes that tasks are drawn from; None: the classes have no names.
    class_names: Sequence[str] | None = None

    def ids(self, iteration: int, meta_batch_size: int) -> Tensor:
        """Return the ids of a meta-batch: int64 ``[B]``, ``iteration * B + (0, ..., B - 1)``."""
        first = iteration * meta_batch_size
        return torch.arange(first, first + meta_batch_size, dtype=torch.int64)

    def content(self) -> str | None:
        """Return a digest of the split's images, if a user may change them; else None."""
        return None

    def samples(self) -> Iterator[NDArray[np.uint8]]:
        """Yield a few images of each class, the same each time; yield nothing for other data."""
        return iter(())

    def names(self, ids: Tensor) -> list[list[str]] | None:
        """Return the tasks' class names by label, if there are any; ``ids`` is int64 ``[B]``."""
        return None

    @abstractmethod
    def tasks(self, ids: Tensor) -> Task:
        """Return the tasks with these ids (int64 ``[B]``), batched, on the CPU.

        Pure: a task is the same alone or in a batch, in any order, in any process. A user's own
        data may return a list of B tasks without the leading dimension; their sizes may differ.
        """

    def keys(self, ids: Tensor, purpose: str, seed: int) -> addresses.Keys:
        """Return the keys of the draws for the tasks with these ids: uint64 ``[B]``."""
        return addresses.keys(seed, self.split, purpose, ids.detach().cpu().numpy())

    def on(self, device: torch.device) -> Self:
        """Return these episodes with tasks on ``device``, of the same bits."""
        if device.type == "cpu":
            return self
        make = self.tasks
        return self.remade(lambda ids: accelerator.sent(make(ids), device))

    def remade(self, make: Callable[[Tensor], Task], **changes: Any) -> Self:
        """Return a copy of these episodes whose tasks come from ``make``, with the same ids."""
        copied = copy.copy(self)
        copied.__dict__.update(changes, tasks=make)
        return copied


def shuffled(episodes: Episodes, seed: int) -> Episodes:
    """Put each support set in a random order, a pure function of (seed, split, id).

    In class-major order, a part of the support set would have the same labels in every task.
    """

    def tasks(ids: Tensor) -> Any:
        return reordered(episodes.tasks(ids), episodes.keys(ids, "support order", seed))

    return episodes.remade(tasks)


def reordered(tasks: Any, keys: addresses.Keys) -> Any:
    """Put each task's support set in a random order; a list has batches of one task each."""
    if isinstance(tasks, list):
        return [reordered(*one) for one in zip(tasks, keys[:, None], strict=True)]
    order = torch.from_numpy(
        addresses.permutation(keys, pytree.tree_leaves(tasks.support_y)[0].shape[1])
    )
    rows = torch.arange(len(order))[:, None]
    support = pytree.tree_map(lambda part: part[rows, order], tuple(tasks[:2]))
    return Task(*support, *tasks[2:])


class ImageClasses(NamedTuple):
    """The images of a split with ``c`` classes, from which few-shot tasks are drawn.

    The images of a class are consecutive. Classes may have different numbers of images.

    * ``images``: uint8 ``[n, H, W]`` or ``[n, H, W, 3]``, usually memory-mapped
    * ``first``: int64 ``[c]``, the row of ``images`` where each class begins
    * ``counts``: int64 ``[c]``, how many images each class has
    * ``rotate``: whether each class of each task is turned by its own random multiple of 90 degrees
      (Santoro et al. 2016, as in MAML's released code)
    * ``names``: the ``c`` names of the classes; None if the classes have no names
    """

    images: NDArray[np.uint8]
    first: NDArray[np.int64]
    counts: NDArray[np.int64]
    rotate: bool
    names: Sequence[str] | None = None

    @classmethod
    def of_equal_size(
        cls,
        images: NDArray[np.uint8],
        rows: NDArray[np.int64],
        *,
        rotate: bool,
        names: Sequence[str] | None = None,
    ) -> ImageClasses:
        """Return classes ``rows``, int64 ``[c]``, of ``images [classes, n, H, W(, 3)]``, uint8."""
        n = images.shape[1]
        first = np.asarray(rows, dtype=np.int64) * n
        flat = images.reshape(-1, *images.shape[2:])
        return cls(flat, first, np.full_like(first, n), rotate, names)

    @classmethod
    def in_order(
        cls, images: NDArray[np.uint8], counts: Sequence[int], names: Sequence[str]
    ) -> ImageClasses:
        """Return consecutive classes with ``counts`` images each, without rotation."""
        of_each = np.array(counts, dtype=np.int64)
        return cls(images, np.cumsum(of_each) - of_each, of_each, rotate=False, names=names)


class Layout(NamedTuple):
    """The composition of ``B`` image tasks, before any image is read."""

    classes: NDArray[np.int64]  # [B, N], places in the split's list of classes, by label
    images: NDArray[np.int64]  # [B, N, K+Q], distinct rows of the image array, the support's first
    quarter_turns: NDArray[np.int64]  # [B, N], counter-clockwise multiples of 90 degrees


class FewShotImages(Episodes):
    """N-way K-shot classification of images (Vinyals et al. 2016, arXiv:1606.04080).

    A task draws ``ways`` distinct classes, in random order, and ``shots + queries`` distinct images
    of each. All classes are equally likely, however many images they have.
    """

    def __init__(
        self,
        of: ImageClasses,
        *,
        split: str,
        ways: int,
        shots: int,
        queries: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
        published: bool = False,
    ) -> None:
        """Raise :class:`DataError`, naming the flag, if the split is too small; read no image.

        Small classes are not skipped, so that ``shots`` and ``queries`` do not change the classes.
        ``published``: nobody changes classes and images, so they need no digest.
        """
        check_counts(ways=ways, shots=shots, queries=queries)
        images, first, counts, self.rotate, self.class_names = of
        if len(images.shape) not in (3, 4):
            raise ValueError(f"images must be [n, H, W(, 3)], not {images.shape}")
        if self.rotate and images.shape[1] != images.shape[2]:
            raise ValueError(f"only square images can turn by 90 degrees, not {images.shape[1:3]}")
        first, counts = np.asarray(first, dtype=np.int64), np.asarray(counts, dtype=np.int64)
        if ways > len(first):
            there = counted(len(first), "class", "classes")
            raise DataError(f"--ways {ways}: the {split} split has only {there}")
        needed = shots + queries
        if len(few := np.flatnonzero(counts < needed)):
            names = self.class_names or [f"class {i}" for i in range(len(counts))]
            shown = ", ".join(f"{counts[i]} of {names[i]}" for i in few[:3])
            more = f" and too few of {len(few) - 3} more classes" if len(few) > 3 else ""
            raise DataError(
                f"--shots {shots} and --queries {queries}: they need {needed} images of a class, "
                f"and the {split} split has {shown}{more}; ask for fewer, add images, or move such "
                "classes elsewhere"
            )
        self.split, self.seed, self.dtype = split, seed, dtype
        self.ways, self.shots, self.queries = ways, shots, queries
        self.first, self.counts = first, counts
        if self.class_names is not None and not published:
            # A disk may encode accents in another form, and names in another encoding than UTF-8.
            listed = unicodedata.normalize("NFC", "\0".join(self.class_names))
            encoded = listed.encode("utf-8", "surrogateescape")
            self.division = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        # A plain view of the same pages: the memmap subclass makes every small operation slower.
        self.images = images.view(np.ndarray) if isinstance(images, np.memmap) else images

    def layout(self, ids: Tensor) -> Layout:
        """Return the composition of the tasks with these ids (int64 ``[B]``). Read no image."""
        drawn = self.keys(ids, "classes", self.seed)
        classes = addresses.choose(drawn, len(self.first), self.ways)
        drawn = addresses.derive(self.keys(ids, "drawings", self.seed), self.ways)
        drawings = addresses.choose(drawn, self.counts[classes], self.shots + self.queries)
        turns = np.zeros_like(classes)
        if self.rotate:
            uniform = addresses.uniforms(self.keys(ids, "rotation", self.seed), self.ways)
            turns = (4 * uniform).astype(np.int64)
        return Layout(classes, self.first[classes][..., None] + drawings, turns)

    def content(self) -> str | None:
        """Read all pixels and return their digest; None if the classes are published ones."""
        if self.division is None:
            return None
        shape = f"{self.images.shape[1:]} {self.counts.tolist()}"
        digest = hashlib.blake2b(shape.encode(), digest_size=8)
        for first, count in zip(self.first.tolist(), self.counts.tolist(), strict=True):
            digest.update(self.images[first : first + count].tobytes())
        return digest.hexdigest()

    def samples(self) -> Iterator[NDArray[np.uint8]]:
        """Yield eight images of each class."""
        for first, count in zip(self.first, self.counts, strict=True):
            yield self.images[first + np.linspace(0, count - 1, 8).astype(int)]

    def names(self, ids: Tensor) -> list[list[str]] | None:
        """Return the names of the tasks' classes, by label; read no image."""
        if (names := self.class_names) is None:
            return None
        return [[names[row] for row in task] for task in self.layout(ids).classes]

    def on(self, device: torch.device) -> Self:
        """See `Episodes.on`. Images of up to `HELD` bytes move there, where tasks are made."""
        remade = "tasks" in vars(self)  # another function makes these tasks
        if device.type == "cpu" or remade or self.images.nbytes > HELD:
            return super().on(device)
        images = torch.from_numpy(np.array(self.images)).to(device)

        def tasks(ids: Tensor) -> Task:
            layout = self.layout(ids)
            rows = accelerator.sent(torch.from_numpy(layout.images), device)
            pixels = images.index_select(0, rows.view(-1)).view(*rows.shape, *images.shape[1:])
            turned = pixels
            for turns in (1, 2, 3) if self.rotate else ():
                # No mask as an index: the host would wait for the number of rows.
                places = accelerator.sent(torch.from_numpy(layout.quarter_turns == turns), device)
                there = places.view(*places.shape, *[1] * (pixels.dim() - 2))
                turned = torch.where(there, torch.rot90(pixels, turns, (3, 4)), turned)
            return self._task(turned)

        return self.remade(tasks)

    def tasks(self, ids: Tensor) -> Task:
        """Return tasks with these ids (int64 ``[B]``): images ``[B, N*K, C, H, W]`` in [0, 1]."""
        layout = self.layout(ids)
        pixels = np.asarray(self.images[layout.images])
        if self.rotate:
            for turns in (1, 2, 3):
                turned = layout.quarter_turns == turns
                pixels[turned] = np.rot90(pixels[turned], turns, axes=(2, 3))
        return self._task(torch.from_numpy(pixels))

    def _task(self, pixels: Tensor) -> Task:
        """Return the tasks of images, uint8 ``[B, N, K+Q, H, W(, 3)]``."""
        parts = pixels[:, :, : self.shots], pixels[:, :, self.shots :]
        return Task(*itertools.chain.from_iterable(map(self._labelled, parts)))

    def _labelled(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return uint8 ``[B, N, n, H, W(, 3)]`` as class-major examples, with their labels."""
        batch, ways, n, *image = pixels.shape
        labels = torch.arange(ways, device=pixels.device)[:, None].expand(ways, n).reshape(-1)
        labels = labels.repeat(batch, 1)
        return scaled(pixels.reshape(batch, ways * n, *image), self.dtype), labels


def scaled(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert uint8 ``[B, E, H, W(, 3)]`` to ``dtype [B, E, C, H, W]`` in [0, 1]."""
    first = pixels.movedim(-1, 2) if pixels.dim() == 5 else pixels[:, :, None]
    return first.contiguous().to(dtype).div_(255)
