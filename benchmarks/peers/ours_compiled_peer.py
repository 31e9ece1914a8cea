"""This project with ``--compile on`` in place of its compiled kernels."""

from __future__ import annotations

from benchmarks.peers import Repetition, ours_peer
from datasets.tasks import Task
from maml.config.presets import with_values
from maml.learners import Learner, build_learner


def build(learner: Learner, tasks: Task, n_threads: int) -> Repetition:
    """Return a repetition, compiled, or read from the cache that an earlier process filled."""
    config = with_values(learner.config, meta_gradient="reverse", kernels="torch", compile="on")
    return ours_peer.build(build_learner(config), tasks, n_threads)
