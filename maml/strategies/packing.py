"""Pack each share into one flat tensor; make outer losses a node of a graph over processes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maml.params import ParamLayout, Params
from maml.worker import Share


class Packing(ParamLayout):
    """The layout of meta-parameters, and of the sums that go with gradients, in a flat tensor."""

    def __init__(self, meta_params: Params, n_totals: int) -> None:
        """Lay out ``meta_params``, and after them a share's ``n_totals`` totals and its count."""
        super().__init__(meta_params)
        self._n_totals = n_totals
        self.share_size = self.n_params + n_totals + 1

    def share(self, share: Share) -> Tensor:
        """Return ``[P + 1 + M + 1]``: gradients, totals and the count; shares add up by element."""
        count = share.totals.new_full((1,), share.n_tasks)
        return torch.cat([*self.parts(share.gradients), share.totals, count])

    def to_share(self, flat: Tensor, n_tasks: int | None = None) -> Share:
        """Return the share that ``flat [P + 1 + M + 1]`` holds, as views of it.

        ``n_tasks``: its count, where known: a device is waited for if it is read.
        """
        gradients, totals, count = flat.split([self.n_params, self._n_totals, 1])
        n_tasks = round(count.item()) if n_tasks is None else n_tasks
        return Share(self.to_params(gradients), totals, n_tasks)


class OuterLosses(torch.autograd.Function):
    """Each task's outer loss as a function of the flat meta-parameters.

    ``forward`` already takes the gradient: `Worker.share` sums it over the tasks, in batches of
    bounded memory. ``backward`` only scales this sum, because all tasks weigh the same in a sum or
    a mean. So only one gradient stays in memory, not the graphs of the tasks.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Share], packing: Packing, leaf: Tensor) -> Tensor:
        """Return ``[B, 1 + M + 1]`` on the CPU: for each task its loss, its metrics, and a one.

        ``compute`` returns the share of all B tasks, with its rows, at the parameters ``leaf [P]``.
        """
        share = compute()
        assert share.rows is not None
        ctx.save_for_backward(packing.params(share.gradients).cpu())
        rows = share.rows.cpu()
        return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)

    @staticmethod
    def backward(ctx: Any, *from_rows: Tensor) -> Any:
        """Return the sum of the tasks' gradients, times the weight that all tasks share."""
        # Only the losses, column 0, are differentiable; metrics and the ones are constants.
        weights = from_rows[0][:, 0]
        (gradient,) = ctx.saved_tensors
        if not bool((weights == weights[0]).all()):
            raise RuntimeError("the tasks of a batch must all weigh the same")
        return None, None, weights[0] * gradient
