"""Parameters as one flat tensor: one operation or one message for all, not one a parameter."""

import torch
from torch import Tensor

from maml.params import Params


class ParamLayout:
    """Where each parameter lies in a flat tensor; the same in every process of a run."""

    def __init__(self, params: Params) -> None:
        """Lay out ``params`` end to end, in the order of their names as given.

        Args:
            params: Parameters by name, of one dtype; their values are not kept.
        """
        self._shapes = {name: tensor.shape for name, tensor in params.items()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self.n_params = sum(self._sizes)
        self.dtype = next(iter(params.values())).dtype

    def parts(self, params: Params) -> list[Tensor]:
        """Return views ``[p]`` of ``params``, detached, in the order of the layout."""
        return [params[name].detach().reshape(-1) for name in self._shapes]

    def params(self, params: Params) -> Tensor:
        """Return a new flat ``[P]`` tensor of ``params``, detached."""
        return torch.cat(self.parts(params))

    def to_params(self, flat: Tensor) -> Params:
        """Return views of ``flat [P]`` by name."""
        parts = zip(self._shapes.items(), flat.split(self._sizes), strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}
