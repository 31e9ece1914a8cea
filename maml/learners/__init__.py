"""Learners define a task's outer loss. Each file declares its learners in ``COMPONENTS``."""

import torch

from datasets.generators import drawn
from maml.config import Config, registry
from maml.errors import UserError
from maml.learners.base import Learner as Learner
from maml.learners.objectives import check_metric_names
from maml.learners.own_parts import complete
from maml.networks.ordinary import own_name
from maml.params import same_numbers


def build_learner(config: Config) -> Learner:
    """Return the learner of ``config`` on the CPU. The seed of ``config`` sets initial weights.

    Raise `UserError` if a user's class is no `Learner`, if its metric names are not allowed, or if
    it cannot learn with the network. Raise `DataError` if the user's code raises an exception.
    """
    known = registry.learner(config.learner)
    kind = known.load()
    if not (isinstance(kind, type) and issubclass(kind, Learner)):
        raise UserError(f"--learner {config.learner}: is no subclass of maml.learners.Learner")
    learner = _made(config)
    for name, parameter in learner.network.named_parameters():
        if not parameter.requires_grad:
            raise UserError(
                f"--learner {config.learner}: it freezes {name} of its network, too late: freeze "
                "it in the network's class or with --freeze"
            )
    check_metric_names(learner.metric_names, f"--learner {config.learner}")
    if known.is_theirs or registry.network(config.network).is_theirs:
        _check_again(learner, _made(config), config)
    return learner


def _made(config: Config) -> Learner:
    """Make the learner once. Its random draws follow the seed, so all processes draw the same."""
    known = registry.learner(config.learner)
    with registry.calling(learner=known), drawn(config.seed, "learner"):
        learner: Learner = known.maker()(config)
    complete(learner, getattr(torch, config.dtype))
    return learner


def _check_again(learner: Learner, again: Learner, config: Config) -> None:
    """Raise `UserError` if the two learners differ, because other processes would differ too."""
    first, second = (
        dict((*made.named_parameters(), *made.named_buffers())) for made in (learner, again)
    )
    for name in (*first, *second):
        if name in first and name in second and same_numbers(first[name], second[name]):
            continue
        what = f"--learner {config.learner}: {name}"
        if name.startswith("network.") and registry.network(config.network).is_theirs:
            inside = own_name(learner.network, name.removeprefix("network."))
            what = f"--network {config.network}: {inside}"
        raise UserError(
            f"{what} differs when it is made twice, so every process would have other values. "
            "Draw it with the global generator of torch, numpy or Python, which follow --seed, or "
            "with a generator that you seed where you make it"
        )
