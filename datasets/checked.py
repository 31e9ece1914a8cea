"""Check a user's own data before a learner uses the data; report a fault in one line."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    known: DataSet
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
        with calling(data=self.known):
            first = int(ids[0]) % (self.episodes.one_pass or 2**63) if len(ids) else 0
            begin(seed_of(self.seed, "task", first, self.split))
            try:
                made: Any = self.episodes.tasks(ids)
            except Exception as error:
                error.add_note(self._named(ids))
                raise
        if not isinstance(made, list):
            return self._looked_at(made, ids)
        # In a list, the sets of tasks may have any sizes.
        if len(made) != len(ids):
            raise self._error(ids, f"{len(made)} tasks for {len(ids)} ids")
        return [self._looked_at(task, ids, alone=True) for task in made]

    def _looked_at(self, made: Any, ids: Tensor, *, alone: bool = False) -> Task:
        if alone and isinstance(made, (tuple, list)) and len(made) == len(Task._fields):
            made = Task(*made)
        parts: dict[str, Any] = {name: getattr(made, name, None) for name in Task._fields}
        for name, part in parts.items():
            if not isinstance(part, Tensor):
                of_tensors = any(isinstance(p, Tensor) for p in pytree.tree_leaves(part))
                several = name.endswith("_x") and of_tensors
                more = ": several inputs go into its columns, for forward to split" * several
                raise self._error(ids, f"{type(made).__name__} without a tensor {name}{more}")
            parts[name] = self._converted(name, part[None] if alone else part)
        found = Task(**parts)
        wrong = _wrong_sets(found, len(ids)) or self._wrong_labels(found) or self._wrong_form(found)
        if wrong:
            raise self._error(ids, wrong)
        return found

    def _error(self, ids: Tensor, wrong: str) -> DataError:
        return DataError(f"{FLAG} {self.known.name}: {self._named(ids)}: {wrong}")

    def _named(self, ids: Tensor) -> str:
        return f"{self.split} task {', '.join(map(str, ids.tolist()))} of seed {self.seed}"

    def _converted(self, name: str, part: Tensor) -> Tensor:
        part = part.detach()  # tasks are data: no gradient flows into what made them
        if part.dtype == torch.uint8 and name.endswith("_x") and part.dim() == 5:
            return part.to(self.dtype).div_(255)
        if part.is_complex():
            return part
        return part.to(self.dtype if part.is_floating_point() else torch.int64)

    def _wrong_labels(self, made: Task) -> str:
        if (ways := self.classes) is None:
            return ""
        for name in ("support_y", "query_y"):
            y = getattr(made, name)
            if not y.is_floating_point() and len(strange := y[(y < 0) | (y >= ways)]):
                of = f"of {ways} ways labels are from 0 to {ways - 1}"
                return f"{name} has the label {int(strange.max())}; {of}"
        return ""

    def _wrong_form(self, made: Task) -> str:
        for name, (dtype, sizes) in (self.form or {}).items():
            part = getattr(made, name)
            if (part.dtype, part.shape[2:]) != (dtype, sizes):
                first = _of(dtype, [str(len(part)), "E", *map(str, sizes)])
                return f"{name} is {_of(part.dtype, part.shape)}; that of the first task is {first}"
        return ""


def _joined(made: list[Any]) -> Any:
    """Join batches or lists of one task each: a batch if they are batches of one size."""
    listed = [one if isinstance(one, list) else [one] for one in made]
    each = list(itertools.chain.from_iterable(listed))
    same = len({tuple(part.shape for part in one) for one in each}) == 1
    if any(isinstance(one, list) for one in made) or not same:
        return each
    return Task(*map(torch.cat, zip(*each, strict=True)))


def _wrong_sets(made: Task, count: int) -> str:
    for part in ("support", "query"):
        x, y = getattr(made, f"{part}_x"), getattr(made, f"{part}_y")
        found = f"{part}_x is {_of(x.dtype, x.shape)} and {part}_y {_of(y.dtype, y.shape)}"
        if x.dim() < 2 or x.shape[:2] != y.shape[:2] or len(x) != count:
            return f"{found}; give [{count}, E, …] each"
        if x.is_complex() or y.is_complex():
            return f"{found}; numbers must be real"
    return "" if made.query_x.numel() else "query_x is empty: there is nothing to answer"


def _of(dtype: torch.dtype, shape: Iterable[object]) -> str:
    return f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"


def shared_classes(data: str, splits: Sequence[Episodes], new: str) -> str:
    """Return a warning if a split of a user's own data has classes of an earlier split, or ""."""
    said: list[str] = []
    met: dict[bytes, str] = {}  # a digest of images, to the first split that has them
    for episodes in splits:
        digests = [hashlib.blake2b(some.tobytes()).digest() for some in episodes.samples()]
        found = Counter(met[digest] for digest in digests if digest in met)
        said += [
            f"{n} of {len(digests)} {episodes.split} classes have the same images as a class of "
            f"{earlier}"
            for earlier, n in found.items()
        ]
        met = dict.fromkeys(digests, episodes.split) | met
    if not said:
        return ""
    says_nothing = f"the accuracy on them says nothing about new {new}"
    return f"warning: {FLAG} {data}: {', and '.join(said)}: {says_nothing}"
