"""Check whether ``torch.func.vmap`` computes the same as a loop over the tasks.

It may not (torch 2.15): an embedding's padding affects only the first task, norms called by
``torch.ops`` are wrong, and some operations cannot be batched at all. So a loss that this project
did not write is computed in both ways on some tasks before vmap is trusted. What the losses keep
must also be what a loop keeps. The trial leaves nothing behind (`maml.execution.trial`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from datasets.generators import kept, state
from maml.execution.outside import COUNTING, Reached, outside_of
from maml.execution.trial import Trial
from maml.metagradient import draws
from maml.metagradient.by_task import Batching, Way
from maml.metagradient.differentiate import meta_gradient
from maml.metagradient.problem import Problem
from maml.params import Params

ROUNDING = 8000
"""Two results agree if they differ by at most so many units of rounding of their norm: in float32,
by a thousandth. Both ways of a small network with group norms differed by 114 units in 12 steps."""
DRAWN = "in randomness error mode"
"""A part of the message of torch's RuntimeError when a batched loss draws a random number."""


class NotRepeatedError(ValueError):
    """Two calls with the same tasks give two results: a loss counts its calls, say."""


class Found(NamedTuple):
    """How tasks of a problem may be computed.

    Attributes:
        batching: "vmap" if it equals a loop over the tasks.
        draws: Whether a loss draws.
        shares: Whether each call writes what threads would share; None: unknown.
        heavy: Whether one task is enough work for a core.
        fills: Whether vmap would write what a repeated loop does not. This may be a cache, which
            the next call in a loop fills, so then it may be batched.
    """

    batching: Batching
    draws: bool = False
    shares: bool | None = None
    heavy: bool = False
    fills: bool = False


def batching_of(
    problem_of: Callable[[Params], Problem],
    meta_params: Params,
    tasks: Any,
    way: Way = "auto",
    *,
    code: Any,
    owner: nn.Module | None = None,
    checked: bool = False,
    weigh: bool = False,
) -> Found:
    """Find out how tasks of a problem may be computed. Errors of the losses in a loop are raised.

    There is no trial if the code reaches what it may write and we cannot put back.

    Args:
        problem_of, meta_params, tasks, way: As for `meta_gradient`. Different tasks tell more.
        code: The function that the user's code is reached from.
        owner: The module that the losses call. Each thread has its own copy of it.
        checked: Whether `checked_way` has checked what the losses read.
        weigh: Whether to compute heavy tasks one by one, on a CPU. They are not tried as a batch,
            because a batch's memory grows with the inner steps.
    """

    def by(batching: Batching) -> list[Tensor]:
        found = meta_gradient(problem_of, meta_params, tasks, way, batching, checked=checked)
        parts = [found.losses, *(found.gradients[name] for name in sorted(found.gradients))]
        return [part.detach().to_dense() for part in parts]

    weigh = weigh and all(tensor.is_cpu for tensor in meta_params.values())
    roots = [code] if owner is None else [code, owner]
    if not Reached(*roots).is_whole:
        return Found("tasks")
    trial = Trial(*roots, weigh=weigh)
    with draws.alone(), kept(), draws.of_task(draws.NONE), COUNTING, trial:
        before = state()
        loop = by("tasks")
        draw, heavy = state() != before, weigh and trial.is_heavy
        with draws.of_task(draws.Address(0, "", 0) if draw else draws.NONE):
            loop = by("tasks") if draw else loop
            held = Reached(code) if owner is None else outside_of(owner, code)
            if not _agree(by("tasks"), loop):
                raise NotRepeatedError(
                    "two calls with the same tasks give two results: a loss or a network counts "
                    "its calls, draws by a generator of its own, or changes its input in place"
                )
            shares = not held.is_same()
        if draw or heavy or shares:
            return Found("tasks", draw, shares, heavy)
        trial.put_back()
        held = Reached(*roots)
        try:
            batched = by("vmap")
        except Exception as error:
            # A network may draw and then restore the generators.
            return Found("tasks", DRAWN in str(error), shares=False)
        if not held.is_same():
            return Found("tasks", fills=True)
        return Found("vmap" if _agree(batched, loop) else "tasks", shares=False)


def _agree(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two results are equal up to rounding."""
    eps = max(torch.finfo(part.dtype).eps for part in b)
    if [part.shape for part in a] != [part.shape for part in b]:
        return False
    x, y = (torch.cat([part.flatten() for part in parts]) for parts in (a, b))
    if not torch.equal(x.isfinite(), y.isfinite()):
        return False
    x, y = (part.nan_to_num(0.0, 0.0, 0.0) for part in (x, y))
    return float((x - y).norm()) <= ROUNDING * eps * float(y.norm())
