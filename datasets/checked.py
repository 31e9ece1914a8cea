"""Check a user's own data before a learner uses the data; report a fault in one line."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets.episodes import Episodes
from datasets.errors import DataError
from datasets.generators import LOCK, begin, kept, seed_of
from datasets.registry import FLAG, DataSet
from datasets.tasks import Task
from datasets.theirs import calling

Form: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""For each part of a task: its dtype, and the shape of one example in this part."""


def form_of(task: Task) -> Form:
    """Return the form of one or more tasks; each part is ``[B, E, …]``."""
    return {name: (p.dtype, tuple(p.shape[2:])) for name, p in task._asdict().items()}


@dataclass
class Checked:
    """Make tasks of a user's own ``episodes``; convert and check them. An error names the bad task.

    Floats become ``dtype``. Images of bytes (uint8 ``[B, E, C, H, W]``) are divided by 255 and
    become ``dtype``, too. All other integers become int64. Each task is made alone, after its
    address has seeded the global generators. So it is the same in every batch, also if the code
    draws, or remembers what it drew.
    """

    episodes: Episodes
    facts: DataSet
    split: str
    seed: int
    dtype: torch.dtype
    form: Form | None = None  # the form that all tasks must have; None: that of task 0
    classes: int | None = None  # integer labels must be below this; None: any labels

    def __post_init__(self) -> None:
        made = self(torch.arange(1))
        self.form = self.form or form_of(made[0] if isinstance(made, list) else made)

    def __call__(self, ids: Tensor) -> Any:
        """Return the tasks with these ids, int64 ``[B]``."""
        with LOCK, kept():
            return _joined([self._made(one) for one in ids.split(1)])

    def _made(self, ids: Tensor) -> Any:
        """Make the task of one id, or none of none."""
        address = f"{self.split} task {', '.join(map(str, ids.tolist()))} of seed {self.seed}"
        with calling(data=self.facts):
            first = int(ids[0]) % (self.episodes.one_pass or 2**63) if len(ids) else 0
            begin(seed_of(self.seed, "task", first, self.split))
            try:
                made: Any = self.episodes.tasks(ids)
            except Exception as error:
                error.add_note(address)
                raise
        try:
            if not isinstance(made, list):
                return self._checked(made, len(ids))
            # In a list, the sets of tasks may have any sizes.
            if len(made) != len(ids):
                raise ValueError(f"{len(made)} tasks for {len(ids)} ids")
            return [self._checked(task, 1, alone=True) for task in made]
        except ValueError as error:
            raise DataError(f"{FLAG} {self.facts.name}: {address}: {error}") from None

    def _checked(self, made: Any, count: int, *, alone: bool = False) -> Task:
        """Return ``count`` tasks, converted; raise ``ValueError`` if something is wrong."""
        if alone and isinstance(made, (tuple, list)) and len(made) == len(Task._fields):
            made = Task(*made)
        parts: dict[str, Any] = {name: getattr(made, name, None) for name in Task._fields}
        for name, part in parts.items():
            if not isinstance(part, Tensor):
                of_tensors = any(isinstance(p, Tensor) for p in pytree.tree_leaves(part))
                several = name.endswith("_x") and of_tensors
                more = ": several inputs go into its columns, for forward to split" * several
                raise ValueError(f"{type(made).__name__} without a tensor {name}{more}")
            parts[name] = self._converted(name, part[None] if alone else part)
        task = Task(**parts)
        for wrong in self._mistakes(task, count):
            raise ValueError(wrong)
        return task

    def _converted(self, name: str, part: Tensor) -> Tensor:
        part = part.detach()  # tasks are data: no gradient flows into what made them
        if part.dtype == torch.uint8 and name.endswith("_x") and part.dim() == 5:
            return part.to(self.dtype).div_(255)
        if part.is_complex():
            return part
        return part.to(self.dtype if part.is_floating_point() else torch.int64)

    def _mistakes(self, task: Task, count: int) -> Iterator[str]:
        """Yield what is wrong with ``count`` tasks."""
        for name, x, y in (("support", *task[:2]), ("query", *task[2:])):
            shapes = f"{name}_x is {_of(x.dtype, x.shape)} and {name}_y {_of(y.dtype, y.shape)}"
            if x.dim() < 2 or x.shape[:2] != y.shape[:2] or len(x) != count:
                yield f"{shapes}; give [{count}, E, …] each"
            if x.is_complex() or y.is_complex():
                yield f"{shapes}; numbers must be real"
        if not task.query_x.numel():
            yield "query_x is empty: there is nothing to answer"
        ways = self.classes or 0
        for name in ("support_y", "query_y") if ways else ():
            y = getattr(task, name)
            strange = y[(y < 0) | (y >= ways)]
            if len(strange) and not y.is_floating_point():
                of = f"of {ways} ways labels are from 0 to {ways - 1}"
                yield f"{name} has the label {int(strange.max())}; {of}"
        for name, (dtype, sizes) in (self.form or {}).items():
            part = getattr(task, name)
            if (part.dtype, part.shape[2:]) != (dtype, sizes):
                first = _of(dtype, [str(len(part)), "E", *map(str, sizes)])
                yield f"{name} is {_of(part.dtype, part.shape)}; that of the first task is {first}"


def _joined(made: list[Any]) -> Any:
    """Join batches or lists of one task each: a batch if they are batches of one size."""
    listed = [one if isinstance(one, list) else [one] for one in made]
    tasks = list(itertools.chain.from_iterable(listed))
    same = len({tuple(part.shape for part in one) for one in tasks}) == 1
    if any(isinstance(one, list) for one in made) or not same:
        return tasks
    return Task(*map(torch.cat, zip(*tasks, strict=True)))


def _of(dtype: torch.dtype, shape: Iterable[object]) -> str:
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"


def shared_classes(data: str, splits: Sequence[Episodes], new: str) -> str:
    """Return a warning if a split of a user's own data has classes of an earlier split, or ""."""
    said: list[str] = []
    met: dict[bytes, str] = {}  # a digest of images, to the first split that has them
    for episodes in splits:
        digests = [hashlib.blake2b(some.tobytes()).digest() for some in episodes.samples()]
        for earlier, n in Counter(met[digest] for digest in digests if digest in met).items():
            classes = f"{n} of {len(digests)} {episodes.split} classes"
            said.append(f"{classes} have the same images as a class of {earlier}")
        met = dict.fromkeys(digests, episodes.split) | met
    if not said:
        return ""
    says_nothing = f"the accuracy on them says nothing about new {new}"
    return f"warning: {FLAG} {data}: {', and '.join(said)}: {says_nothing}"
