"""Model-Agnostic Meta-Learning (Finn et al. 2017, arXiv:1703.03400) and its variants.

ANIL (Raghu et al. 2020, arXiv:1909.09157, section 4) adapts only the output layer. BOIL (Oh et al.
2021, arXiv:2008.08882, section 3) adapts all but the output layer. Both are MAML with another
``--adapt``. First-order MAML (section 5.2) is MAML with ``--order first``. Meta-SGD (Li et al.
2017, arXiv:1707.09835) learns the inner rates as well, and Meta-Curvature (Park and Oliva 2019,
arXiv:1902.03356) a transformation of the inner gradients.
"""

import dataclasses
import functools
from typing import ClassVar

import torch
import torch.nn.functional as F

from maml.config import Config, registry
from maml.errors import UserError
from maml.learners.adapting import adapting, tree
from maml.learners.base import Learner
from maml.learners.objectives import Given
from maml.metagradient.problem import Problem, Transform
from maml.networks.loss import of_loss
from maml.params import Params, without_prefix

COMPONENTS = {
    "maml": {
        "attribute": "MAML",
        "help": "initial weights from which a few inner steps suit a task",
        "reads": (
            "inner_lr", "inner_steps", "eval_inner_steps", "inner_optimizer", "inner_momentum",
            "order", "adapt", "label_smoothing", "shots", "queries", "eval_queries",
        ),
    },
    "anil": {"like": "maml", "help": "adapts only the output layer", "adapts": "@head"},
    "boil": {"like": "maml", "help": "adapts all but the output layer", "adapts": "@body"},
    "metasgd": {
        "like": "maml",
        "attribute": "MetaSGD",
        "help": "learns an inner rate for each weight, too",
        "refuses": {"inner_steps": {0: "would have no use for its rates"}},
    },
    "metacurv": {
        "like": "maml",
        "attribute": "MetaCurvature",
        "help": "learns how the inner gradients are transformed",
        "refuses": {"inner_steps": {0: "would have no use for its matrices"}},
    },
}  # fmt: skip


class MAML(Learner):
    """Initial weights from which a few inner steps on the support set suit the query set.

    Attributes:
        adapting: ``{name: rate}`` of what adapts: the rate is a multiple of ``--inner-lr``.
        still: The names of the network's other parameters.
    """

    network_adapts: ClassVar[bool] = True
    """True if the inner loop adapts the network's parameters."""

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        pattern, why = config.adapt, f"--adapt {config.adapt}"
        if pattern is None:
            pattern, why = registry.learner(config.learner).adapts, f"--learner {config.learner}"
        names = self.network_weights(self.meta_parameters())
        why += f" with --network {config.network}"
        moving = adapting(pattern, self.network, names, why)
        self.adapting = {name: rate for name, rate in moving.items() if name not in self.frozen}
        if not self.adapting and self.network_adapts:
            raise UserError(f"{why}: all that would adapt is frozen")
        self.still = [name for name in names if name not in self.adapting]
        self.inner_rates = given.rates if given is not None else None
        if self.inner_rates is not None:
            self._rates_of = self.inner_rates.of_names(self.network, [*self.adapting])
        if config.label_smoothing:
            if self.objective.loss is not F.cross_entropy or not self.inherits("loss"):
                raise UserError(
                    f"--label-smoothing {config.label_smoothing}: needs the cross-entropy of "
                    "classes as the loss, and here is another one"
                )
            self.criterion = functools.partial(
                F.cross_entropy, label_smoothing=config.label_smoothing
            )

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return the problem: the query loss after the last inner step (algorithm 2, line 10)."""
        weights = self.network_weights(meta_params)
        lr, rates, own = self.config.inner_lr, None, self.inner_rates
        if own is not None:
            lr = 1.0
            rates = [
                {
                    name: factor * own.at(self._rates_of[name], step, meta_params)
                    for name, factor in self.adapting.items()
                }
                for step in range(steps)
            ]
        elif set(self.adapting.values()) != {1.0}:
            of_each = {n: weights[n].new_full((), rate) for n, rate in self.adapting.items()}
            rates = [of_each] * steps
        return Problem(
            start={name: weights[name] for name in self.adapting},
            fixed={name: weights[name] for name in self.still} | of_loss(meta_params),
            **self.stated_losses(),
            optimizer=self.config.inner_optimizer,
            momentum=self.config.inner_momentum,
            lr=lr,
            steps=steps,
            order=self.config.order,
            rates=rates,
        )


class MetaSGD(MAML):
    """MAML that also learns an inner rate α for each of the initial weights θ.

    θ' = θ − α ∘ ∇L(θ) (equation 3) is one of ``--inner-steps`` steps (the paper takes one). With
    another ``--inner-optimizer``, its update replaces the gradient. Rates begin at ``--inner-lr``
    times the rate in ``--adapt``.
    """

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        weights = self.network_weights(self.meta_parameters())
        # The rates of ``network.…`` have the name ``rates.…``.
        self.rates = tree(
            {
                name: torch.full_like(weights[name], config.inner_lr * rate)
                for name, rate in self.adapting.items()
            }
        )

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return MAML's problem, with the same learned rates at each step."""
        rates = without_prefix(meta_params, "rates.")
        problem = super().problem(meta_params, steps)
        return dataclasses.replace(problem, lr=1.0, rates=[rates] * steps)


class MetaCurvature(MAML):
    """MAML whose inner gradients G are multiplied by learned matrices, which begin as identities.

    MC(G) = G ×₃ M_f ×₂ M_i ×₁ M_o (equation 7). A convolution has a matrix each for outputs, inputs
    and kernel pixels; a weight matrix has one each for outputs and inputs. A vector has a factor
    for each element, as in learn2learn. The same matrices serve every inner step.
    """

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        weights = self.network_weights(self.meta_parameters())
        matrices = {}
        for name in self.adapting:
            weight = weights[name]
            for axis, size in _axes(weight.shape).items():
                identity = torch.eye(size) if weight.dim() > 1 else torch.ones(size)
                matrices[f"{name}.{axis}"] = identity.to(weight)
        self.curvature = tree(matrices)

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return MAML's problem, with transformed inner gradients."""
        matrices = without_prefix(meta_params, "curvature.")
        problem = super().problem(meta_params, steps)
        return dataclasses.replace(problem, transform=Transform(curved, matrices))


def curved(gradients: Params, matrices: Params) -> Params:
    """Return MC(G) of each gradient G; ``matrices`` has ``{name.axis: …}`` for its name."""
    found = {}
    for name, gradient in gradients.items():
        axes = _axes(gradient.shape)
        folded = gradient.reshape(*axes.values())
        for place, axis in enumerate(axes):
            matrix = matrices[f"{name}.{axis}"]
            if axis == "each":
                folded = matrix * folded
            else:
                folded = torch.tensordot(matrix, folded, dims=([1], [place])).movedim(0, place)
        found[name] = folded.reshape(gradient.shape)
    return found


def _axes(shape: torch.Size) -> dict[str, int]:
    """Return the axes along which a parameter's gradient is transformed, and their sizes."""
    if len(shape) <= 1:
        return {"each": shape.numel()}
    kernel = {} if len(shape) == 2 else {"kernel": shape[2:].numel()}
    return {"out": shape[0], "in": shape[1], **kernel}
