"""Fast Context Adaptation, CAVIA (Zintgraf et al. 2019, arXiv:1810.03642)."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from datasets.generators import drawn
from maml.config import Config
from maml.errors import UserError
from maml.learners.maml import MAML
from maml.learners.objectives import Given
from maml.metagradient.problem import Problem
from maml.networks.headless import layer_of
from maml.networks.ordinary import own_name
from maml.params import Params

COMPONENTS = {
    "cavia": {
        "like": "maml",
        "attribute": "CAVIA",
        "help": "adapts a small context that modulates one layer of the network",
        "reads": ("context",),
        "ignores": {"adapt": "adapts its context alone"},
        "refuses": {"inner_steps": {0: "would have no use for its context"}},
    }
}  # fmt: skip


class CAVIA(MAML):
    """All tasks share one network. A context φ adapts, and begins at zero for each task.

    φ ← φ − α ∇_φ L (equation 3), and the outer loop learns all the rest (equation 4). The context
    modulates the layer that the network declares as its ``context_layer``:

    - FiLM follows a batch norm (section 3.3): h ← (1 + γ) h + β, (γ, β) = A φ. We compute FiLM as
      another scale and shift of the norm, which gives the same result. The released code has
      γ = A φ + b in place of 1 + A φ; here the context 0 does not change the network.
    - A linear layer's bias moves by A φ, as if φ were appended to the layer's input (section 3.2).
    """

    network_adapts: ClassVar[bool] = False

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        layer = getattr(self.network, "context_layer", None)
        if not isinstance(layer, str):
            raise UserError(
                f"--network {config.network} does not say where a context goes: give its class "
                'context_layer = "name of a batch norm or a linear layer"'
            )
        where, first = layer_of(self.network, layer)
        self._bias, self._scale = f"{first}.bias", f"{first}.weight"
        scale, bias = (getattr(where, name, None) for name in ("weight", "bias"))
        self._films = not isinstance(where, nn.Linear)
        # A norm has a scale and a shift for each channel.
        is_norm = all(isinstance(each, Tensor) and each.dim() == 1 for each in (scale, bias))
        if not isinstance(bias, Tensor) or bias.is_complex() or (self._films and not is_norm):
            raise UserError(
                f"--network {config.network}: its context_layer, {own_name(self.network, layer)}, "
                "is no batch norm with a scale and a shift, and no linear layer with a bias"
            )
        size = len(bias)
        with drawn(config.seed, "context"):
            modulation = torch.empty((1 + self._films) * size, config.context)
            nn.init.xavier_uniform_(modulation)
        self.modulation = nn.Parameter(modulation.to(getattr(torch, config.dtype)))

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return the problem: the context adapts, weights and modulation stand still."""
        modulation = meta_params["modulation"]
        problem = super().problem(meta_params, steps)
        return dataclasses.replace(
            problem,
            start={"context": modulation.new_zeros(self.config.context)},
            fixed=problem.start | problem.fixed | {"modulation": modulation},
            rates=None,
        )

    def modulated(self, params: Params) -> Params:
        """See `Learner.modulated`: return the weights as the context modulates them."""
        if "context" not in params:
            return params
        by = params["modulation"] @ params["context"]
        # The layer alone changes, not those that share its tensors.
        tied: dict[str, str] = getattr(self.network, "tied", {})
        params = params | {name: params[own] for name, own in tied.items()}
        if not self._films:
            return params | {self._bias: params[self._bias] + by}
        scale, shift = by.chunk(2)
        return params | {
            self._scale: params[self._scale] * (1 + scale),
            self._bias: params[self._bias] * (1 + scale) + shift,
        }
