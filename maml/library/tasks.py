"""Few-shot tasks of any data set, by id."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from datasets import open_episodes
from datasets.episodes import Episodes
from datasets.errors import DataError
from datasets.opening import options_of
from datasets.tasks import Task
from maml.errors import UserError
from maml.library import inputs
from maml.library.alone import alone, in_words_of_the_library


class Tasks:
    """An endless stream of tasks; a task is the same whenever, and on whatever machine, it is made.

    Attributes:
        episodes: The data set's own sampler.
    """

    def __init__(self, episodes: Episodes) -> None:
        self.episodes = episodes

    def __repr__(self) -> str:
        """Return how large a task is: ``<tasks of 5 support and 75 query examples>``."""
        support, query = (len(y) for y in (self.task(0).support_y, self.task(0).query_y))
        return f"<tasks of {support} support and {query} query examples>"

    @alone()
    def task(self, id: int) -> Task:
        """Return task ``id``: ``support_x [N·K, C, H, W]`` in [0, 1], ``support_y [N·K]``, ….

        N is the number of ways, K of shots; examples lie class by class, labels are 0 … N − 1.
        """
        return Task(*(part[0] for part in self._of([inputs.whole(id, "id")])))

    @alone()
    def tasks(self, ids: Iterable[int]) -> Task:
        """Return the B tasks ``ids`` as one: a leading dimension B everywhere.

        Raises:
            UserError: for an id that is no whole number, at least 0.
        """
        if not isinstance(ids, Iterable):
            raise UserError(f"ids {ids!r}: give a list of task ids")
        return self._of([inputs.whole(id, "id") for id in ids])

    def _of(self, ids: list[int]) -> Task:
        return self.episodes.tasks(torch.tensor(ids, dtype=torch.int64))


@alone()
def episodes(
    data: str,
    split: str = "test",
    *,
    ways: int = 5,
    shots: int = 1,
    queries: int = 15,
    seed: int = 0,
    data_root: Path | str | None = None,
    **options: Any,
) -> Tasks:
    """Return the few-shot tasks of a split of a data set.

    Args:
        data: What ``--data`` takes: "omniglot", "glyphs", …
        split: "train", "validation" or "test".
        ways: Classes a task.
        shots: Support examples a class.
        queries: Query examples a class.
        seed: Another seed has other tasks; 0 is the runs' default.
        data_root: Where the data sets are; by default ``$MAML_DATA``, then ``~/.cache/maml``.
        options: What else this data set takes: ``dtype``, ``omniglot_split``, ``image_size``, ….

    Raises:
        UserError: one line that names the option, or the file, that is not in order.
    """
    known: set[str] | None = None
    try:
        known = options_of(data)
        for name in options:
            if known is not None and name not in known:
                takes = ", ".join(sorted(known - {"data_root"}))
                raise UserError(f"{name}: no option of data {data!r}, which takes {takes}")
        return Tasks(
            open_episodes(
                data,
                split,
                ways=ways,
                shots=shots,
                queries=queries,
                seed=seed,
                data_root=data_root,
                **options,
            )
        )
    except DataError as error:
        given = {"data", "ways", "shots", "queries", "seed", "data_root", "split", *options}
        raise UserError(in_words_of_the_library(str(error), given | (known or set()))) from error
