"""Whether ``torch.func.vmap`` computes what a loop over the tasks would.

It need not: an embedding's padding counts for the first task alone, norms that are called by
``torch.ops`` are wrong, and some operations cannot be batched at all (torch 2.15). So a loss that
this project did not write is computed in both ways on some tasks before it is believed.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maml.metagradient import draws
from maml.metagradient.by_task import Batching, Way
from maml.metagradient.differentiate import meta_gradient
from maml.metagradient.problem import Problem
from maml.params import Params, in_float64
from maml.seeds import kept

APART = {torch.float64: 1e-6, torch.float32: 1e-3}
"""By how much two ways of computing a gradient may differ by rounding."""


class NotRepeatedError(ValueError):
    """Two calls with the same tasks give two results: a loss counts its calls, say."""


class Found(NamedTuple):
    """How tasks of a problem may be computed, and whether a loss draws: then by "tasks" alone."""

    batching: Batching
    draws: bool


def batching_of(
    problem_of: Callable[[Params], Problem],
    meta_params: Params,
    tasks: Any,
    way: Way = "auto",
    *,
    checked: bool = False,
    heavy: bool = False,
) -> Found:
    """Find out how tasks of a problem may be computed: "vmap" where that equals a loop over them.

    Args are those of `meta_gradient`, of B tasks that differ: two or more tell more than one.
    ``heavy``: one task is work enough; then the batch is not tried, whose memory grows with the
    inner steps. Whatever the losses raise in a plain loop is raised.
    """

    def by(batching: Batching, params: Params, tasks: Any) -> Tensor:
        found = meta_gradient(problem_of, params, tasks, way, batching, checked=checked)
        parts = [found.losses, *(found.gradients[name] for name in sorted(found.gradients))]
        return torch.cat([part.detach().to_dense().flatten() for part in parts])

    with kept(), draws.of_task(draws.NONE):
        before = draws.state()
        given = meta_params, tasks
        try:
            # Rounding says less there.
            given = pytree.tree_map(in_float64, given)
            loop = by("tasks", *given)
        except Exception:
            # A loss may hold tensors of its own, of another dtype.
            given = meta_params, tasks
            loop = by("tasks", *given)
        draw = draws.state() != before
        with draws.of_task(draws.Address(0, "", 0) if draw else draws.NONE):
            loop = by("tasks", *given) if draw else loop
            if not _same(by("tasks", *given), loop):
                raise NotRepeatedError(
                    "two calls with the same tasks give two results: a loss or a network counts "
                    "its calls, or draws by a generator of its own"
                )
        if draw or heavy:
            return Found("tasks", draws=draw)
        try:
            # They are about the speed of what may not be chosen.
            with warnings.catch_warnings(action="ignore"):
                batched = by("vmap", *given)
        except Exception:
            return Found("tasks", draws=False)
    return Found("vmap" if _same(batched, loop) else "tasks", draws=False)


def _same(a: Tensor, b: Tensor) -> bool:
    """Say whether two results are equal but for rounding."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = (part.nan_to_num(0.0, 0.0, 0.0) for part in (a, b))
    return float((a - b).norm()) <= APART.get(a.dtype, 1e-2) * max(float(b.norm()), 1e-300)
