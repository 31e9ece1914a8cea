"""Check whether ``torch.func.vmap`` computes the same as a loop over the tasks.

It may not (torch 2.15): an embedding's padding affects only the first task, norms called by
``torch.ops`` are wrong, and some operations cannot be batched at all. So a loss that this project
did not write is computed in both ways on some tasks before vmap is trusted.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets.generators import kept, state
from maml.metagradient import draws
from maml.metagradient.by_task import Batching, Way
from maml.metagradient.differentiate import meta_gradient
from maml.metagradient.problem import Problem
from maml.params import Params, in_float64

APART = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Two results for a gradient agree if they differ by at most this share of its norm."""
DRAWN = "in randomness error mode"
"""A part of the message of torch's RuntimeError when a batched loss draws a random number."""


class NotRepeatedError(ValueError):
    """Two calls with the same tasks give two results: a loss counts its calls, say."""


class Found(NamedTuple):
    """How tasks of a problem may be computed, and whether a loss draws (then only by "tasks")."""

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
    """Find out how tasks of a problem may be computed: "vmap" if it equals a loop over the tasks.

    Args are those of `meta_gradient`. Two or more different tasks tell more than one task.
    ``heavy``: one task is enough work for a core. Then a batch is not tried, because its memory
    grows with the inner steps. Errors of the losses in a plain loop are raised.
    """

    def by(batching: Batching, params: Params, tasks: Any) -> Tensor:
        found = meta_gradient(problem_of, params, tasks, way, batching, checked=checked)
        parts = [found.losses, *(found.gradients[name] for name in sorted(found.gradients))]
        return torch.cat([part.detach().to_dense().flatten() for part in parts])

    with draws.alone(), kept(), draws.of_task(draws.NONE):
        before = state()
        given = meta_params, tasks
        try:
            # Rounding errors are smaller in float64.
            given = pytree.tree_map(in_float64, given)
            loop = by("tasks", *given)
        except Exception:
            # A loss may hold tensors of another dtype, which do not combine with float64.
            given = meta_params, tasks
            loop = by("tasks", *given)
        draw = state() != before
        with draws.of_task(draws.Address(0, "", 0) if draw else draws.NONE):
            loop = by("tasks", *given) if draw else loop
            if not _same(by("tasks", *given), loop):
                raise NotRepeatedError(
                    "two calls with the same tasks give two results: a loss or a network counts "
                    "its calls, draws by a generator of its own, or changes its input in place"
                )
        if draw or heavy:
            return Found("tasks", draws=draw)
        try:
            # The warnings are about vmap's speed, but vmap may not be chosen.
            with warnings.catch_warnings(action="ignore"):
                batched = by("vmap", *given)
        except Exception as error:
            # A network may draw and then restore the generators.
            return Found("tasks", draws=DRAWN in str(error))
    return Found("vmap" if _same(batched, loop) else "tasks", draws=False)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are equal up to rounding."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = (part.nan_to_num(0.0, 0.0, 0.0) for part in (a, b))
    return float((a - b).norm()) <= APART.get(a.dtype, 1e-2) * max(float(b.norm()), 1e-300)
