"""MAML++ (Antoniou et al. 2019, arXiv:1810.09502). Each of its parts has its own flag."""

import dataclasses

import torch

from maml.config import Config
from maml.errors import UserError
from maml.learners.adapting import tree
from maml.learners.maml import MAML
from maml.learners.objectives import Given
from maml.metagradient.problem import Problem
from maml.networks.ordinary import norm_parameters, to_buffers
from maml.params import Params, without_prefix

COMPONENTS = {
    "mamlpp": {
        "like": "maml",
        "attribute": "MAMLpp",
        "help": "MAML++: rates, norms and query losses of each step",
        "refuses": {"inner_steps": {0: "would have no step to learn rates of"}},
        "reads": (
            "lslr", "per_step_norm", "msl_epochs", "first_order_epochs", "iterations_per_epoch"
        ),
        "adapts": "*,@norm=0",
    }
}  # fmt: skip


class MAMLpp(MAML):
    """MAML with the changes that MAML++ makes to the inner problem, each with a flag.

    In the paper they are LSLR (``--lslr``: section 4, equation 4), BNWB (``--per-step-norm``), MSL
    (``--msl-epochs``: equation 3) and DA (``--first-order-epochs``); docs/learners.md has the flags
    of its other parts. The inner loop does not adapt the norms' values of a step, and the query
    loss after the step uses them. The released batch norms keep running statistics for each step.
    These never reach an output, because the layers always normalise by the current batch.

    If evaluation takes more steps than training, the further steps use the rates and norms of the
    last training step.
    """

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        weights = self.network_weights(self.meta_parameters())
        norms = norm_parameters(self.network) if config.per_step_norm else []
        # A frozen scale or shift keeps one value for all steps.
        norms = [name for name in norms if name not in self.frozen]
        both = [name for name in norms if name in self.adapting]
        if both:
            raise UserError(
                f"--adapt {config.adapt}: {both[0]} has values of its own for each step, which do "
                "not adapt; add @norm=0, or give --no-per-step-norm"
            )
        self.still = [name for name in self.still if name not in norms]
        steps = config.inner_steps
        if config.lslr:
            # The rates of ``network.…`` are ``rates.…``: [steps].
            self.rates = tree(
                {
                    name: weights[name].new_full((steps,), config.inner_lr * rate)
                    for name, rate in self.adapting.items()
                }
            )
        if norms:
            # The values of ``network.…`` for each step are ``norms.…``: [steps, …].
            self.norms = tree({n: torch.stack([weights[n]] * steps) for n in norms})
            to_buffers(self.network, norms)

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return the problem of evaluation: the query loss after the last step."""
        problem = super().problem(meta_params, steps)
        rates, norms = (without_prefix(meta_params, prefix) for prefix in ("rates.", "norms."))
        last = self.config.inner_steps - 1
        if self.config.lslr:
            of_steps = [{n: r[min(step, last)] for n, r in rates.items()} for step in range(steps)]
            problem = dataclasses.replace(problem, lr=1.0, rates=of_steps)
        if norms and steps:
            own = [{n: t[min(step, last)] for n, t in norms.items()} for step in range(steps)]
            problem = dataclasses.replace(problem, step_params=own)
        elif norms:
            first = {name: tensor[0] for name, tensor in norms.items()}
            problem = dataclasses.replace(problem, fixed=problem.fixed | first)
        return problem

    def training_problem(self, meta_params: Params, phase: int) -> Problem:
        """Return the problem of epoch ``phase``, with the query weights and order of that epoch."""
        config = self.config
        problem = self.problem(meta_params, config.inner_steps)
        if phase < config.msl_epochs:
            weights = weights_of(phase, config.inner_steps, config.msl_epochs)
            problem = dataclasses.replace(problem, query_weights=weights)
        if phase < config.first_order_epochs:
            problem = dataclasses.replace(problem, order="first")
        return problem

    def phase(self, iteration: int) -> int:
        """Return the epoch of ``iteration``, but at most `last_phase`."""
        return min(iteration // self.config.iterations_per_epoch, self.last_phase)

    @property
    def last_phase(self) -> int:
        """The epoch from which on the training problem stays the same."""
        return max(self.config.msl_epochs, self.config.first_order_epochs)


def weights_of(epoch: int, steps: int, epochs: int) -> list[float]:
    """Return the weights of the query losses after each step, which add up to 1.

    As in the released code, all weights begin at 1 / steps. Weights of earlier steps fall linearly
    to zero over ``epochs``, but not below 0.03 / steps. The last step's weight is the rest.
    """
    earlier = max((1 - epoch / epochs) / steps, 0.03 / steps)
    return [earlier] * (steps - 1) + [1 - earlier * (steps - 1)]
