"""A user's own tasks may be drawn from the global generators: then a task's address seeds them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from datasets.episodes import Episodes
from datasets.generators import LOCK, begin, kept, seed_of, state
from datasets.tasks import Task


@dataclass
class Seeded:
    """Make the tasks of ``episodes``, one by one as soon as their code is seen to draw."""

    episodes: Episodes
    seed: int
    split: str

    def __call__(self, ids: Tensor) -> Any:
        """Return what `Episodes.tasks` returns for ``ids``, int64 ``[B]``."""
        with LOCK, kept():
            made = None if len(ids) > 1 and self.episodes.draws else self._made(ids)
            if len(ids) > 1 and self.episodes.draws:
                made = _joined([self._made(one) for one in ids.split(1)])
            return made

    def _made(self, ids: Tensor) -> Any:
        first = int(ids[0]) % (self.episodes.one_pass or 2**63) if len(ids) else 0
        begin(seed_of(self.seed, "task", first, self.split))
        before = state()
        made = self.episodes.tasks(ids)
        if state() != before:
            vars(self.episodes)["draws"] = True  # also where an author's class is frozen
        return made


def _joined(made: list[Any]) -> Any:
    """Join batches or lists of one task each: a batch if they are batches of one size."""
    if not any(isinstance(one, list) for one in made):
        if len({tuple(part.shape for part in one) for one in made}) == 1:
            return Task(*map(torch.cat, zip(*made, strict=True)))
        made = [[Task(*(part[0] for part in one))] for one in made]
    return [task for one in made for task in one]
