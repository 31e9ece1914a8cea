"""Meta-Curvature (Park and Oliva 2019, arXiv:1902.03356)."""

import dataclasses

import torch

from maml.config import Config
from maml.learners.adapting import tree
from maml.learners.maml import MAML
from maml.learners.objectives import Given
from maml.metagradient.problem import Problem, Transform
from maml.params import Params, without_prefix

COMPONENTS = {
    "metacurv": {
        "like": "maml",
        "attribute": "MetaCurvature",
        "help": "learns how the inner gradients are transformed",
        "refuses": {"inner_steps": {0: "would have no use for its matrices"}},
    }
}


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
