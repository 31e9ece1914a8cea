"""Ordinary classification as a stream of tasks: a task is a mini-batch.

So a mini-batch is a pure function of (seed, split, id). Batch statistics always come from one
mini-batch, for any number of workers.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datasets import addresses
from datasets.episodes import Episodes, ImageClasses, scaled
from datasets.errors import DataError
from datasets.tasks import Task

# A constant of the project, not the run's --seed: the order of held-out examples never changes.
_SEED = 1998


class Examples(NamedTuple):
    """The ``n`` labelled images of a split. Other splits may share the array ``images``."""

    images: NDArray[np.uint8]  # [images, H, W] or [images, H, W, 3]
    rows: NDArray[np.int64]  # [n], the rows of images that belong to the split
    labels: NDArray[np.int64]  # [n], the classes of rows


class Batches(Episodes):
    """Mini-batches of E examples, for training or for evaluation.

    *Training* (``reference`` is None): task ``id`` is batch ``id % b`` of epoch ``id // b``. An
    epoch is a permutation of the n examples at the address (seed, split, epoch), cut into
    b = n // E batches. The mini-batch is the query set; the support set is empty.

    *Evaluation*: tasks 0, 1, … run through the examples in one order, the same for every ``seed``,
    and start again. The support set is a batch of E training examples from ``reference``, at the
    address (seed, split, id). Networks normalise by it if queries may not depend on one another.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        split: str,
        batch_size: int,
        seed: int,
        reference: Examples | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Raise :class:`DataError` if there are fewer examples than ``batch_size``; read none."""
        for name, some in ((split, examples), ("train", reference)):
            if some is not None and len(some.rows) < batch_size:
                has = f"the {name} split has only {len(some.rows)} examples"
                raise DataError(f"--batch-size {batch_size}: {has}")
        self.split, self.batch_size, self.seed, self.dtype = split, batch_size, seed, dtype
        self._examples, self._reference = examples, reference
        n = len(examples.rows)
        self.one_pass = n // batch_size if reference is None else -(-n // batch_size)
        self._order = addresses.permutation(addresses.keys(_SEED, split, "order", 0), n)[0]
        # Consecutive ids need the same epoch. Another thread may already be in the next epoch.
        self._epoch = functools.lru_cache(maxsize=4)(self._permutation)

    def tasks(self, ids: Tensor) -> Task:
        """Return the tasks with these ids (int64 ``[B]``); in training the support set is empty."""
        index = ids.detach().cpu().numpy()
        if self._reference is None:
            x, y = self._take(self._examples, self._drawn(len(self._examples.rows), index))
            return Task(x[:, :0], y[:, :0], x, y)
        places = index[:, None] * self.batch_size + np.arange(self.batch_size)
        query = self._take(self._examples, self._order[places % len(self._order)])
        support = self._take(self._reference, self._drawn(len(self._reference.rows), index))
        return Task(*support, *query)

    def samples(self) -> Iterator[NDArray[np.uint8]]:
        """Yield eight images of each class."""
        images, rows, labels = self._examples
        for label in np.unique(labels):
            of_class = rows[labels == label]
            yield images[of_class[np.linspace(0, len(of_class) - 1, 8).astype(int)]]

    def _drawn(self, n: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return places in [0, n) for batches with these indices (``[B]``): int64 ``[B, E]``."""
        size = self.batch_size
        places = np.empty((len(index), size), dtype=np.int64)
        for row, i in zip(places, index.tolist(), strict=True):
            epoch, batch = divmod(i, n // size)
            row[:] = self._epoch(n, epoch)[batch * size : (batch + 1) * size]
        return places

    def _permutation(self, n: int, epoch: int) -> NDArray[np.int64]:
        return addresses.permutation(addresses.keys(self.seed, self.split, "epoch", epoch), n)[0]

    def _take(self, examples: Examples, places: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return images and labels at ``places [B, E]``."""
        pixels = np.asarray(examples.images[examples.rows[places]])
        return scaled(torch.from_numpy(pixels), self.dtype), torch.from_numpy(
            examples.labels[places]
        )


PLACES = {"train": range(0, 14), "validation": range(14, 16), "test": range(16, 20)}
"""Each split's places in the 20 drawings of a class. In Omniglot, one hand drew the same place in
every class of an alphabet, so its test drawings come from hands that its training drawings lack."""


def labelled(classes: ImageClasses, learned: Sequence[str], what: str) -> Examples:
    """Return all images of named classes; a label is the place of the class in ``learned``."""
    names = list(classes.names or ())
    if strange := sorted({*names} ^ {*learned}):
        raise DataError(f"{what} must have the classes of train, and {strange[0]} is not in both")
    labels = np.repeat([learned.index(name) for name in names], classes.counts)
    spans = zip(classes.first, classes.first + classes.counts, strict=True)
    return Examples(classes.images, np.concatenate([np.arange(*span) for span in spans]), labels)


def divide(classes: ImageClasses, split: str, ways: int) -> Examples:
    """Return the split's drawings of the first ``ways`` classes; :class:`DataError` if too few."""
    if not 1 <= ways <= len(classes.first):
        raise DataError(f"--ways {ways}: the train split has only {len(classes.first)} classes")
    places = np.asarray(PLACES[split])
    rows = (classes.first[:ways, None] + places).astype(np.int64)
    labels = np.repeat(np.arange(ways, dtype=np.int64), len(places))
    return Examples(classes.images.view(np.ndarray), rows.ravel(), labels)
