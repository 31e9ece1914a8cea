"""Learners: what a task's outer loss is. One file a learner, with its facts; none is named here."""

from __future__ import annotations

from maml.config import Config, registry
from maml.errors import UserError
from maml.learners.base import Learner, OuterGradient
from maml.seeds import drawn


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
    # What a learner of a user's own draws at its making is the same in every process.
    with registry.calling(learner=known), drawn(config.seed, "learner"):
        learner: Learner = known.maker()(config)
    for name, parameter in learner.named_parameters():
        if not parameter.requires_grad:
            raise UserError(
                f"--learner {config.learner}: {name} requires no gradient, but a learner's own "
                "parameters learn: make it a buffer; or freeze what is the network's in its class, "
                "or by --freeze"
            )
    return learner


__all__ = ["Learner", "OuterGradient", "build_learner"]
