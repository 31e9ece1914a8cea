"""The peers, one file each: ``build(learner, tasks)`` returns a repetition.

A repetition computes Σ over tasks of the meta-gradient and returns it by the learner's names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from datasets.tasks import Task
from maml.config.presets import with_values
from maml.learners import Learner, build_learner
from maml.params import Params

Repetition = Callable[[], Params]

OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-torch": {"meta_gradient": "reverse", "kernels": "torch"},
    "ours-compiled": {"meta_gradient": "reverse", "kernels": "torch", "compile": "on"},
    "ours-mixed": {"meta_gradient": "mixed", "kernels": "torch"},
    "ours-reverse": {"meta_gradient": "reverse"},
    "ours-vmap": {"batching": "vmap"},
    "ours-tasks": {"batching": "tasks"},
}
"""This project as a run calls it, and with other flags."""
OF_MAML = (
    *("ours", "ours-torch", "ours-compiled"),
    *("learn2learn", "higher", "torchopt", "vmap", "compiled"),
)
OF_OWN = ("ours", "ours-vmap", "ours-tasks", "learn2learn", "higher", "torchopt", "plain")
"""The peers that can compute the meta-gradient of each learner, or of a network of one's own."""
PEERS = tuple(dict.fromkeys((*OF_MAML, *OF_OWN)))


def build(name: str, learner: Learner, tasks: Task) -> Repetition:
    """Return a repetition of peer ``name``."""
    module = "ours" if name in OURS else name
    if OURS.get(name):
        learner = build_learner(with_values(learner.config, **OURS[name]))
    repetition: Repetition = importlib.import_module(f"benchmarks.peers.{module}_peer").build(
        learner, tasks
    )
    return repetition
