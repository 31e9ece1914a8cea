"""Tasks whose support examples lie in a random order, each task's own."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datasets import addresses
from datasets.episodes import Episodes
from datasets.tasks import Task


class ShuffledSupport(Episodes):
    """The tasks of other episodes, but with their support sets shuffled.

    For who goes through a support set in parts: in class-major order the labels of a part would be
    the same in every task. The order is a pure function of (seed, split, id), as the task is.
    """

    def __init__(self, episodes: Episodes, seed: int) -> None:
        self._episodes, self._seed = episodes, seed
        self.split, self.one_pass = episodes.split, episodes.one_pass
        self.division = episodes.division
        self.class_count, self.class_names = episodes.class_count, episodes.class_names

    def ids(self, iteration: int, meta_batch_size: int) -> Tensor:
        """The task ids of a meta-batch, as in the other episodes."""
        return self._episodes.ids(iteration, meta_batch_size)

    def following(self, ids: Tensor, iterations: int) -> Tensor:
        """The ids of a later meta-batch, as in the other episodes."""
        return self._episodes.following(ids, iterations)

    def content(self) -> str | None:
        """A digest of the images, as in the other episodes."""
        return self._episodes.content()

    def classes(self, ids: Tensor) -> NDArray[np.int64] | None:
        """The classes, as in the other episodes: by label."""
        return self._episodes.classes(ids)

    def names(self, ids: Tensor) -> list[list[str]] | None:
        """The names of the classes, as in the other episodes: by label."""
        return self._episodes.names(ids)

    def tasks(self, ids: Tensor) -> Task:
        """The tasks with these ids (int64 ``[B]``), each support set in its own order."""
        tasks = self._episodes.tasks(ids)
        keys = addresses.keys(self._seed, self.split, "support order", ids.cpu().numpy())
        order = torch.from_numpy(addresses.permutation(keys, tasks.support_y.shape[1]))
        rows = torch.arange(len(order))[:, None]
        return tasks._replace(
            support_x=tasks.support_x[rows, order], support_y=tasks.support_y[rows, order]
        )
