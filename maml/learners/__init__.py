"""Learners: what a task's outer loss is. Files state their learners' facts; none is named here."""

from maml.config import Config, registry
from maml.errors import UserError
from maml.learners.base import Learner
from maml.learners.objectives import check_metric_names
from maml.networks.ordinary import own_name
from maml.params import same_numbers
from maml.seeds import drawn


def build_learner(config: Config) -> Learner:
    """Return the learner of ``config`` on the CPU, initial weights addressed by its seed.

    A `UserError` refuses a user's own that is no learner, names its metrics as it may not, or
    cannot learn with the network; a `DataError` says that it ends in an exception.
    """
    known = registry.learner(config.learner)
    kind = known.load()
    if not (isinstance(kind, type) and issubclass(kind, Learner)):
        raise UserError(f"--learner {config.learner}: is no subclass of maml.learners.Learner")
    learner = _made(config)
    check_metric_names(learner.metric_names, f"--learner {config.learner}")
    if known.is_theirs or registry.network(config.network).is_theirs:
        _check_again(learner, _made(config), config)
    for name, parameter in learner.named_parameters():
        if not parameter.requires_grad:
            raise UserError(
                f"--learner {config.learner}: {name} requires no gradient, but a learner's own "
                "parameters learn: make it a buffer; or freeze what is the network's in its class, "
                "or by --freeze"
            )
    return learner


def _made(config: Config) -> Learner:
    """Make the learner once; what it draws meanwhile is the same in every process."""
    known = registry.learner(config.learner)
    with registry.calling(learner=known), drawn(config.seed, "learner"):
        learner: Learner = known.maker()(config)
    return learner


def _check_again(learner: Learner, again: Learner, config: Config) -> None:
    """Refuse what comes out another way when it is made again: so it would in another process."""
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
            f"{what} comes out another way when it is made again, so every process would "
            "have another one. Draw it by the global generator of torch, numpy or Python, which "
            "follow --seed, or by a generator that is seeded where it is made"
        )


__all__ = ["Learner", "build_learner"]
