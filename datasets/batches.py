"""Ordinary classification as a stream of tasks: a task is a mini-batch.

So a mini-batch is a pure function of (seed, split, id), and batch statistics are of one, whatever
the number of workers.
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

# A constant of the project, not the run's --seed: held-out examples come in one order.
_SEED = 1998


class Examples(NamedTuple):
    """The ``n`` labelled images of a split, as a view of an array that others share."""

    images: NDArray[np.uint8]  # [images, H, W] or [images, H, W, 3]
    rows: NDArray[np.int64]  # [n], the rows of images that belong to the split
    labels: NDArray[np.int64]  # [n], the classes of rows


class Batches(Episodes):
    """Mini-batches of E examples, to learn from or to be tested on.

    *To learn from* (``reference`` is None): task ``id`` is batch ``id % b`` of epoch ``id // b``,
    where an epoch is a permutation of the n examples at the address (seed, split, epoch), cut into
    b = n // E batches. The mini-batch is the query set; the support set is empty.

    *To be tested on*: tasks 0, 1, … run through the examples in one order, whatever ``seed`` is,
    and begin again. The support set is a batch of E training examples, those of ``reference``, at
    the address (seed, split, id): what a network normalises by where no query may depend on others.
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
        # Consecutive ids ask for the same epoch; calls of other threads may be an epoch further.
        self._epoch = functools.lru_cache(maxsize=4)(self._permutation)

    def tasks(self, ids: Tensor) -> Task:
        """The tasks with these ids (int64 ``[B]``), the support set empty while training."""
        index = ids.detach().cpu().numpy()
        if self._reference is None:
            x, y = self._take(self._examples, self._drawn(len(self._examples.rows), index))
            return Task(x[:, :0], y[:, :0], x, y)
        places = index[:, None] * self.batch_size + np.arange(self.batch_size)
        query = self._take(self._examples, self._order[places % len(self._order)])
        support = self._take(self._reference, self._drawn(len(self._reference.rows), index))
        return Task(*support, *query)

    def samples(self) -> Iterator[NDArray[np.uint8]]:
        """Eight images of each class."""
        images, rows, labels = self._examples
        for label in np.unique(labels):
            own = rows[labels == label]
            yield images[own[np.linspace(0, len(own) - 1, 8).astype(int)]]

    def _drawn(self, n: int, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in [0, n) of the batches with these indices (``[B]``): int64 ``[B, E]``."""
        size = self.batch_size
        places = np.empty((len(index), size), dtype=np.int64)
        for row, i in zip(places, index.tolist(), strict=True):
            epoch, batch = divmod(i, n // size)
            row[:] = self._epoch(n, epoch)[batch * size : (batch + 1) * size]
        return places

    def _permutation(self, n: int, epoch: int) -> NDArray[np.int64]:
        return addresses.permutation(addresses.keys(self.seed, self.split, "epoch", epoch), n)[0]

    def _take(self, examples: Examples, places: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Images and labels at ``places [B, E]``."""
        pixels = np.asarray(examples.images[examples.rows[places]])
        return scaled(pixels, self.dtype), torch.from_numpy(examples.labels[places])


PLACES = {"train": range(0, 14), "validation": range(14, 16), "test": range(16, 20)}
"""Of a class's 20 drawings, those of each split. In Omniglot the same hand drew the same place of
every class of an alphabet: the test's are of hands that were never seen."""


def labelled(found: ImageClasses, learned: Sequence[str], what: str) -> Examples:
    """All images of classes that have names, labelled by their place among those ``learned``."""
    names = list(found.names or ())
    if strange := sorted({*names} ^ {*learned}):
        raise DataError(f"{what} must have the classes of train, and {strange[0]} is not in both")
    labels = np.repeat([learned.index(name) for name in names], found.counts)
    places = zip(found.first, found.counts, strict=True)
    rows = np.concatenate([np.arange(first, first + count) for first, count in places])
    return Examples(found.images, rows, labels)


def divide(found: ImageClasses, split: str, ways: int) -> Examples:
    """Other drawings of the first ``ways`` classes; :class:`DataError` if there are too few."""
    if not 1 <= ways <= len(found.first):
        raise DataError(f"--ways {ways}: the train split has only {len(found.first)} classes")
    places = np.asarray(PLACES[split])
    rows = found.first[:ways, None] + places
    labels = np.repeat(np.arange(ways, dtype=np.int64), len(places))
    return Examples(found.images.view(np.ndarray), rows.reshape(-1).astype(np.int64), labels)
