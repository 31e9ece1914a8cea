"""Learners: what a task's outer loss is. One file a learner, with its facts; none is named here."""

from __future__ import annotations

from maml.config import Config, registry
from maml.errors import UserError
from maml.learners.base import Learner, OuterGradient


def build_learner(config: Config) -> Learner:
    """Return the learner of ``config`` on the CPU, initial weights addressed by its seed.

    Raises:
        UserError: if a user's own is no learner, or cannot learn with the network.
        DataError: if a user's own ends in an exception.
    """
    known = registry.learner(config.learner)
    kind = known.load()
    if not (isinstance(kind, type) and issubclass(kind, Learner)):
        raise UserError(f"--learner {config.learner}: is no subclass of maml.learners.Learner")
    with registry.calling("learner", known):
        learner = kind(config)
    if known.adapts_head and not isinstance(getattr(learner.network, "head_prefix", None), str):
        raise UserError(
            f"--learner {config.learner} adapts the output layer alone, and --network "
            f"{config.network} does not say which that is: give its class "
            'head_prefix = "name of the layer."'
        )
    return learner


__all__ = ["Learner", "OuterGradient", "build_learner"]
