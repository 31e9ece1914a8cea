"""Few-shot tasks of any data set, by id."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from datasets import open_episodes
from datasets.checked import Checked
from datasets.episodes import Episodes, FewShotImages
from datasets.errors import DataError
from datasets.learn2learn_tasks import Tasksets, is_taskset
from datasets.opening import image_classes, options_of
from datasets.registry import DataSet
from datasets.tasks import Task
from maml.errors import UserError
from maml.library import inputs
from maml.library.alone import alone, in_words_of_the_library
from maml.metagradient.by_task import one_by_one

LENGTH = 2**24
"""The number of tasks that a loader goes through. No training uses as many."""


class Tasks(Dataset[Task]):
    """An endless stream of tasks. An id gives the same task at any time and on any machine.

    For torch it is a data set of `LENGTH` tasks: ``torch.utils.data.DataLoader(tasks,
    batch_size=8)`` yields ``tasks(range(8))``, ``tasks(range(8, 16))``, …, with any workers.

    Attributes:
        episodes: The data set's own sampler.
    """

    def __init__(self, episodes: Episodes) -> None:
        self.episodes = episodes

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, id: int) -> Task:
        return self.task(id)

    @alone()
    def task(self, id: int) -> Task:
        """Return task ``id``: ``support_x [N·K, C, H, W]`` in [0, 1], ``support_y [N·K]``, ….

        N is the number of ways, K of shots; examples lie class by class, labels are 0 … N − 1.
        """
        made = next(one_by_one(self._of([inputs.whole(id, "id")])))
        return Task(*(part[0] for part in made))

    @alone()
    def tasks(self, ids: Iterable[int]) -> Task:
        """Return the B tasks ``ids`` as one batch: every tensor has a leading dimension B.

        Raises:
            UserError: for an id that is not a whole number of at least 0.
        """
        if not isinstance(ids, Iterable):
            raise UserError(f"ids {ids!r}: give a list of task ids")
        return self._of([inputs.whole(id, "id") for id in ids])

    def _of(self, ids: list[int]) -> Task:
        if ids and max(ids) >= 2**63:
            raise UserError(f"id {max(ids)}: give a number below 2**63")
        return self.episodes.tasks(torch.tensor(ids, dtype=torch.int64))


@alone()
def episodes(
    data: str | Mapping[str, Any],
    split: str | None = None,
    *,
    ways: int = 5,
    shots: int = 1,
    queries: int = 15,
    seed: int = 0,
    data_root: Path | str | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tasks:
    """Return the few-shot tasks of a split of a data set.

    Args:
        data: A value of ``--data``, as "omniglot" or "glyphs"; or ``{class: images}``, uint8 arrays
            or tensors ``[n, H, W]`` or ``[n, H, W, 3]`` of one size; or a Taskset of learn2learn.
        split: "train", "validation" or "test"; only for a named data set.
        ways: Classes per task.
        shots: Support examples per class.
        queries: Query examples per class.
        seed: Another seed gives other tasks; 0 is the default of runs.
        data_root: The folder of the data sets; by default ``$MAML_DATA``, then ``~/.cache/maml``.
        device: Where the tasks are. On a GPU, images stay there, and tasks are made of them there,
            with the same bits as on the CPU.
        options: Further options of this data set: ``dtype``, ``omniglot_split``, ``image_size``, ….

    Raises:
        UserError: for a wrong option or file, in one line that names it.
    """
    task: dict[str, Any] = {
        name: inputs.whole(value, name)
        for name, value in (("ways", ways), ("shots", shots), ("queries", queries), ("seed", seed))
    }
    known: set[str] | None = {"dtype"}
    what = "data at hand"
    try:
        if isinstance(data, str):
            known, what = options_of(data), f"data {data!r}"
            if split is None:
                raise UserError("split: give train, validation or test")
        elif split is not None:
            raise UserError(
                f"split {split!r}: only named data sets have splits; give that split's classes as "
                "data"
            )
        for name in options:
            if known is not None and name not in known:
                takes = ", ".join(sorted(known - {"data_root"})) or "no options"
                raise UserError(f"{name}: no option of {what}, which takes {takes}")
        place = _place(device)
        if isinstance(data, str) and split is not None:
            found = open_episodes(data, split, data_root=data_root, **task, **options)
        else:
            found = _at_hand(data, task, options)
        return Tasks(found.on(place))
    except DataError as error:
        given = {"data", "data_root", "split", *task, *options, *(known or ())}
        raise UserError(in_words_of_the_library(str(error), given)) from error


def _place(device: torch.device | str) -> torch.device:
    """Return a device that is there, with its index."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        raise UserError(f"device {str(device)!r}: {str(error).splitlines()[0]}") from error


def _at_hand(data: Any, task: dict[str, Any], options: dict[str, Any]) -> Episodes:
    """Return episodes of ``{class: images}``, or of a Taskset of learn2learn."""
    if isinstance(data, Mapping):
        found = image_classes(data, "{class: images}", "train")
        return FewShotImages(found, split="train", **task, **options)
    if is_taskset(data):
        seed, dtype = task.pop("seed"), options.get("dtype", torch.float32)
        drawn = Tasksets(data, "a Taskset", "train", **task)
        return drawn.remade(Checked(drawn, DataSet("a Taskset", ""), "train", seed, dtype))
    raise UserError(
        f"data is a {type(data).__name__}; give the name of a data set, {{class: images}}, a "
        'Taskset of learn2learn, or "folder" with data_root=… for files'
    )
