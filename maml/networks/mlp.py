"""MAML's network for points: regression, and policies."""

import torch.nn.functional as F
from torch import Tensor, nn

from maml.networks.statistics import Statistics

COMPONENTS = {
    "mlp": {
        "attribute": "MLP",
        "help": "two hidden layers of 40, for regression and policies",
        "takes": "points",
    },
}


class MLP(nn.Module):
    """MAML's regression network (arXiv:1703.03400, section 5.1): two hidden layers of 40, ReLU."""

    head_prefix = "layers.2."
    context_layer = "layers.0"

    def __init__(self, image_shape: None, ways: int, *, inputs: int) -> None:
        """Map ``inputs`` numbers to ``ways`` numbers; all networks take an ``image_shape``."""
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(inputs, 40), nn.Linear(40, 40), nn.Linear(40, ways)))
        # PyTorch's default initialisation, not the released code's normal with σ = 0.01.

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> tuple[Tensor, Statistics]:
        """Map ``[E, inputs]`` to ``[E, ways]``; there are no statistics."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x), ()
