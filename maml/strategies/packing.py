"""Shares and parameters as one flat tensor each: one message a step, not one a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from maml.inner import Params
from maml.worker import Share


class Packing:
    """Where each meta-parameter lies in a flat tensor; the same in every process of a run."""

    def __init__(self, meta_params: Params, n_totals: int) -> None:
        """Lay out ``meta_params`` end to end, in the order of their names as given.

        Args:
            meta_params: The meta-parameters by name; their values are not kept.
            n_totals: Elements of `Share.totals`.
        """
        self._shapes = {name: tensor.shape for name, tensor in meta_params.items()}
        self.n_params = sum(shape.numel() for shape in self._shapes.values())
        self._n_totals = n_totals
        self.dtype = next(iter(meta_params.values())).dtype
        self.share_size = self.n_params + n_totals + 1

    def params(self, params: Params) -> Tensor:
        """Return a new flat ``[P]`` tensor of ``params``, detached."""
        return torch.cat([params[name].detach().reshape(-1) for name in self._shapes])

    def to_params(self, flat: Tensor) -> Params:
        """Return views of ``flat [P]`` by name."""
        parts = flat.split([shape.numel() for shape in self._shapes.values()])
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def share(self, share: Share) -> Tensor:
        """Return ``[P + 1 + M + 1]``: gradients, totals and the count, which all add up."""
        flat = [share.gradients[name].reshape(-1) for name in self._shapes]
        return torch.cat([*flat, share.totals, share.totals.new_tensor([share.n_tasks])])

    def to_share(self, flat: Tensor) -> Share:
        """Return the share that ``flat [P + 1 + M + 1]`` holds, as views of it."""
        gradients, totals, count = flat.split([self.n_params, self._n_totals, 1])
        return Share(self.to_params(gradients), totals, round(count.item()))
