"""Shares as one flat tensor each: one message a step, not one a parameter."""

import torch
from torch import Tensor

from maml.params import ParamLayout, Params
from maml.worker import Share


class Packing(ParamLayout):
    """Where meta-parameters, and what is summed with their gradients, lie in a flat tensor."""

    def __init__(self, meta_params: Params, n_totals: int) -> None:
        """Lay out ``meta_params`` and, behind them, a share's totals and count.

        Args:
            meta_params: The meta-parameters by name; their values are not kept.
            n_totals: Elements of `Share.totals`.
        """
        super().__init__(meta_params)
        self._n_totals = n_totals
        self.share_size = self.n_params + n_totals + 1

    def share(self, share: Share) -> Tensor:
        """Return ``[P + 1 + M + 1]``: gradients, totals and the count, which all add up."""
        count = share.totals.new_tensor([share.n_tasks])
        return torch.cat([*self.parts(share.gradients), share.totals, count])

    def to_share(self, flat: Tensor) -> Share:
        """Return the share that ``flat [P + 1 + M + 1]`` holds, as views of it."""
        gradients, totals, count = flat.split([self.n_params, self._n_totals, 1])
        return Share(self.to_params(gradients), totals, round(count.item()))
