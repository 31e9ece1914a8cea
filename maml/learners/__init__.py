"""Learners: what a task's outer loss is. One file a learner; `build_learner` knows them all."""

from __future__ import annotations

from maml.config import Config
from maml.learners.anil import ANIL
from maml.learners.base import Learner, OuterGradient
from maml.learners.imaml import IMAML
from maml.learners.maml import MAML
from maml.learners.meta_sgd import MetaSGD
from maml.learners.supervised import Supervised

LEARNERS: dict[str, type[Learner]] = {
    "maml": MAML,
    "anil": ANIL,
    "metasgd": MetaSGD,
    "imaml": IMAML,
    "supervised": Supervised,
}


def build_learner(config: Config) -> Learner:
    """Return the learner of ``config`` on the CPU, initial weights addressed by its seed."""
    return LEARNERS[config.learner](config)


__all__ = ["LEARNERS", "Learner", "OuterGradient", "build_learner"]
