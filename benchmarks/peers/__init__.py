"""The peers, one file each: ``build(learner, tasks, n_threads)`` returns a repetition.

A repetition computes Σ over tasks of the meta-gradient and returns it by the learner's names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from datasets.tasks import Task
from maml.learners import Learner
from maml.params import Params

Repetition = Callable[[], Params]

PEERS = {
    "ours": "this project, as the launcher runs it",
    "ours-torch": "this project without its compiled kernels",
    "ours-compiled": "this project with --compile on in place of its kernels",
    "learn2learn": "learn2learn's MAML, task by task",
    "higher": "higher's inner loop, task by task",
    "torchopt": "TorchOpt's MetaSGD, task by task",
    "vmap": "torch.func: vmap of grad of grad, eager",
    "compiled": "torch.compile of the same",
    "mamlpp": "torch.func: the same of MAML++",
}
OF_MAMLPP = ("ours", "ours-torch", "ours-compiled", "mamlpp")
OF_MAML = tuple(name for name in PEERS if name != "mamlpp")
"""Who can compute the meta-gradient of which learner."""


def build(name: str, learner: Learner, tasks: Task, n_threads: int) -> Repetition:
    """Return a repetition of peer ``name``."""
    module = importlib.import_module(f"benchmarks.peers.{name.replace('-', '_')}_peer")
    repetition: Repetition = module.build(learner, tasks, n_threads)
    return repetition
