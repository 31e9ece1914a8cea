"""What is asked of a trained learner beside its scores: as one of an ensemble, class by class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.errors import UserError
from maml.learners.base import Learner, Predictions
from maml.networks import mixing
from maml.networks.alone import alone_with
from maml.networks.norms import tensors
from maml.params import Params


def evaluate_together(learner: Learner, models: Sequence[Params], tasks: Task) -> dict[str, Tensor]:
    """Return the `Learner.scores` of an ensemble: of its models' mean outputs.

    Each model adapts by itself. For a classifier, outputs are logits: their mean, not that of
    probabilities, is what MAML++'s released code takes (experiment_builder.py).

    Raises:
        UserError: for a learner that is not evaluated by its outputs, as one that acts.
    """
    _check(learner, "--ensemble")
    steps = learner.config.eval_inner_steps
    answers = [learner.predictions(params, tasks, steps) for params in models]
    together = Predictions(*(torch.stack(of).mean(0) for of in zip(*answers, strict=True)))
    return learner.scores(together, tasks.query_y)


@torch.no_grad()
def confusions(learner: Learner, meta_params: Params, tasks: Task, *, transductive: bool) -> Tensor:
    """Return how often each of B tasks' queries of a label got each label.

    Args:
        learner: Evaluated as `Learner.evaluate` does.
        meta_params: The meta-parameters.
        tasks: Of classes.
        transductive: Which of the two `Predictions` counts.

    Returns:
        ``[B, N, N]`` int64: true label, then predicted one.

    Raises:
        UserError: as `evaluate_together`; for outputs that are no numbers.
    """
    _check(learner, "--by-class")
    answers = learner.predictions(meta_params, tasks, learner.config.eval_inner_steps)
    outputs = answers.transductive if transductive else answers.non_transductive
    if outputs.isnan().any():
        raise UserError("--by-class: the model's outputs are no numbers: it has diverged")
    ways = outputs.shape[-1]
    pairs = tasks.query_y * ways + outputs.argmax(-1)
    counts = pairs.new_zeros(len(pairs), ways * ways)
    return counts.scatter_add_(1, pairs, torch.ones_like(pairs)).reshape(-1, ways, ways)


def mixes(learner: Learner, x: Tensor) -> bool:
    """Say whether the network answers an example by the others of its set, whatever is given.

    Then no answer is non-transductive; of `answers` that its author overrides nothing is known.
    See `maml.networks.mixing`, also for ``x [E, …]``.
    """
    kind, network = type(learner), learner.network
    stated = kind.answers.__module__.startswith("maml.")
    if not stated or kind.call_network is not Learner.call_network:
        return False
    with alone_with(network):
        on_cpu = {name: tensor.cpu() for name, tensor in tensors(network).items()}
        return mixing.mixes(network, on_cpu, x.cpu())


def _check(learner: Learner, flag: str) -> None:
    if type(learner).evaluate is not Learner.evaluate:
        name = learner.config.learner
        raise UserError(f"{flag}: --learner {name} is not evaluated by its outputs")
