"""R2D2: ridge regression as the classifier (Bertinetto et al. 2019, arXiv:1805.08136)."""

import math

import torch
from torch import Tensor, nn

from maml.config import Config
from maml.learners.embedding import Embedding
from maml.learners.objectives import Given
from maml.params import Params

COMPONENTS = {
    "r2d2": {
        "like": "protonet",
        "attribute": "R2D2",
        "help": "ridge regression on features, in closed form",
    }
}


class R2D2(Embedding):
    """A query's logits are those of a ridge regression of the classes on the support features.

    W = Xᵀ (X Xᵀ + λ I)⁻¹ Y (equation 4: a system of as many unknowns as support examples) and
    logits α X' W (equation 6), with a column of ones in X for the bias, and with X and Y divided by
    √S, as in the released code. λ and α are learned, as logarithms, so that they stay positive: the
    released code learns α itself and has λ by a flag. Equation 6 has a shift β of all logits, too,
    which no softmax sees.
    """

    def __init__(self, config: Config, given: Given | None = None) -> None:
        super().__init__(config, given)
        dtype = getattr(torch, config.dtype)
        self.log_lambda = nn.Parameter(torch.zeros((), dtype=dtype))
        self.log_alpha = nn.Parameter(torch.full((), math.log(10.0), dtype=dtype))

    def logits(self, params: Params, support: Tensor, one_hot: Tensor, query: Tensor) -> Tensor:
        """Solve for each query's logits, without the weights: α X' Xᵀ (X Xᵀ + λ I)⁻¹ Y."""
        scale = len(support) ** -0.5
        x = torch.cat([support, torch.ones_like(support[:, :1])], dim=1) * scale
        queries = torch.cat([query, torch.ones_like(query[:, :1])], dim=1)
        eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
        solution = torch.linalg.solve(x @ x.T + params["log_lambda"].exp() * eye, one_hot * scale)
        return params["log_alpha"].exp() * (queries @ (x.T @ solution))
