"""torch.compile of the torch.func peer."""

from __future__ import annotations

import torch

from benchmarks.peers import Repetition
from benchmarks.peers.vmap_peer import total_loss
from datasets.tasks import Task
from maml.learners import Learner
from maml.params import Params


def build(learner: Learner, tasks: Task) -> Repetition:
    """Return a repetition; the first one compiles."""
    total, weights, names = total_loss(learner)
    gradient = torch.compile(torch.func.grad(total))

    def repetition() -> Params:
        return {names[name]: g for name, g in gradient(weights, tasks).items()}

    return repetition
