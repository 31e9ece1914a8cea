"""Few-shot tasks of any data set, by id."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from datasets import open_episodes
from datasets.by_class import image_classes
from datasets.episodes import Episodes, FewShotImages
from datasets.errors import DataError
from datasets.opening import options_of
from datasets.tasks import Task
from maml.errors import UserError
from maml.library import inputs
from maml.library.alone import alone, in_words_of_the_library


class Tasks(IterableDataset[Task]):
    """An endless stream of tasks; a task is the same whenever, and on whatever machine, it is made.

    ``torch.utils.data.DataLoader(tasks, batch_size=8)`` yields the batches of ``tasks(range(8))``,
    ``tasks(range(8, 16))``, …; each of several workers of a loader makes every so many-th task.

    Attributes:
        episodes: The data set's own sampler.
    """

    def __init__(self, episodes: Episodes) -> None:
        self.episodes = episodes

    def __repr__(self) -> str:
        """Return how large a task is: ``<tasks of 5 support and 75 query examples>``."""
        support, query = (len(y) for y in (self.task(0).support_y, self.task(0).query_y))
        return f"<tasks of {support} support and {query} query examples>"

    def __iter__(self) -> Iterator[Task]:
        """Yield task 0, 1, 2, … without end; in a loader's worker, its share of them."""
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.task, itertools.count(first, step))

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
    data: str | Mapping[str, Any],
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
        data: What ``--data`` takes: "omniglot", "glyphs", …; or ``{class: images}``, uint8 arrays
            or tensors ``[n, H, W]`` or ``[n, H, W, 3]`` of one size.
        split: "train", "validation" or "test". Other splits of ``{class: images}`` have other
            tasks of the same classes.
        ways: Classes a task.
        shots: Support examples a class.
        queries: Query examples a class.
        seed: Another seed has other tasks; 0 is the runs' default.
        data_root: Where the data sets are; by default ``$MAML_DATA``, then ``~/.cache/maml``.
        options: What else this data set takes: ``dtype``, ``omniglot_split``, ``image_size``, ….

    Raises:
        UserError: one line that names the option, or the file, that is not in order.
    """
    known: set[str] | None = {"dtype"}
    task: dict[str, Any] = {"ways": ways, "shots": shots, "queries": queries, "seed": seed}
    if not isinstance(data, str | Mapping):
        raise UserError(
            f"data is a {type(data).__name__}; give the name of a data set, {{class: images}}, or "
            '"folder" with data_root=… for files'
        )
    try:
        known = options_of(data) if isinstance(data, str) else known
        for name in options:
            if known is not None and name not in known:
                takes = ", ".join(sorted(known - {"data_root"}))
                what = f"data {data!r}" if isinstance(data, str) else "{class: images}"
                raise UserError(f"{name}: no option of {what}, which takes {takes}")
        if isinstance(data, str):
            return Tasks(open_episodes(data, split, data_root=data_root, **task, **options))
        found = image_classes(data, "{class: images}", split)
        return Tasks(FewShotImages(found, split=split, **task, **options))
    except DataError as error:
        given = {"data", "data_root", "split", *task, *options}
        raise UserError(in_words_of_the_library(str(error), given | (known or set()))) from error
