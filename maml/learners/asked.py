"""What is asked of a trained learner beside its scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.errors import UserError
from maml.learners.base import Learner, Predictions
from maml.networks import mixing
from maml.params import Params


def evaluate_together(learner: Learner, models: Sequence[Params], tasks: Task) -> dict[str, Tensor]:
    """Return the `Learner.scores` of an ensemble: of its models' mean outputs.

    Each model adapts by itself. For a classifier, outputs are logits: their mean, not that of
    probabilities, is what MAML++'s released code takes (experiment_builder.py).

    Raises:
        UserError: for a learner that is not evaluated by its outputs, as one that acts.
    """
    if type(learner).evaluate is not Learner.evaluate:
        name = learner.config.learner
        raise UserError(f"--ensemble: --learner {name} is not evaluated by its outputs")
    steps = learner.config.eval_inner_steps
    answers = [learner.predictions(params, tasks, steps) for params in models]
    together = Predictions(*(torch.stack(of).mean(0) for of in zip(*answers, strict=True)))
    return learner.scores(together, tasks.query_y)


def mixes(learner: Learner, x: Tensor) -> bool:
    """Say whether the network answers an example by the others of its set, whatever is given.

    Then no answer is non-transductive; of `answers` that its author overrides nothing is known.
    See `maml.networks.mixing`, also for ``x [E, …]``.
    """
    kind = type(learner)
    stated = kind.answers.__module__.startswith("maml.")
    if not stated or kind.call_network is not Learner.call_network:
        return False
    return mixing.mixes(learner.network, x)
