"""Check whether ``torch.func.vmap`` computes the same as a loop over the tasks.

It may not (torch 2.15): an embedding's padding affects only the first task, norms called by
``torch.ops`` are wrong, and some operations cannot be batched at all. So a loss that this project
did not write is computed in both ways on some tasks before vmap is trusted. What the losses keep
must also be what a loop keeps. The trial leaves nothing behind (`maml.execution.trial`).
"""

import math
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

ROUNDING = 16
"""Two results agree if they differ by at most so many units of rounding, or by so many times what
a change of the parameters by a few units changes in a loop."""
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
        problem_of: As the other arguments here, one of `meta_gradient`.
        meta_params: ``{name: […]}``.
        tasks: Two or more different tasks tell more than one task.
        way: How to differentiate.
        code: The function that the user's code is reached from.
        owner: The module that the losses call. Each thread has its own copy of it.
        checked: Whether `checked_way` has checked what the losses read.
        weigh: Whether to compute heavy tasks one by one. They are not tried as a batch, because a
            batch's memory grows with the inner steps.
    """

    def by(batching: Batching, params: Params = meta_params) -> list[Tensor]:
        found = meta_gradient(problem_of, params, tasks, way, batching, checked=checked)
        parts = [found.losses, *(found.gradients[name] for name in sorted(found.gradients))]
        return [part.detach().to_dense() for part in parts]

    def nudged() -> list[Tensor]:
        return by("tasks", {name: _nudged(tensor) for name, tensor in meta_params.items()})

    def outside() -> Reached:
        return Reached(code) if owner is None else outside_of(owner, code)

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
            held = outside()
            if not _is_repeated(by("tasks"), loop):
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
        return Found("vmap" if _agree(batched, loop, nudged) else "tasks", shares=False)


def _is_repeated(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two calls agree. Operations on a GPU may add up in another order each time."""
    return max(_distances(a, b)) <= _rounding(b) ** 0.5 * _norm(b)


def _agree(a: list[Tensor], b: list[Tensor], nudged: Callable[[], list[Tensor]]) -> bool:
    """Return whether two results are equal up to rounding, which ``nudged`` shows if in doubt."""
    apart, near = _distances(a, b), ROUNDING * _rounding(b) * _norm(b)
    if max(apart) <= near:
        return True
    moved = _distances(nudged(), b)
    pairs = zip(apart, moved, strict=True)
    return max(apart) < math.inf and all(x <= near + ROUNDING * y for x, y in pairs)


def _rounding(parts: list[Tensor]) -> float:
    return max(torch.finfo(part.dtype).eps for part in parts)


def _norm(parts: list[Tensor]) -> float:
    return math.hypot(*(float(part.nan_to_num(0.0, 0.0, 0.0).norm()) for part in parts))


def _distances(a: list[Tensor], b: list[Tensor]) -> list[float]:
    """Return the norm of each tensor's difference; infinite if the forms are not the same."""
    return [_distance(x, y) for x, y in zip(a, b, strict=True)]


def _distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = (part.nan_to_num(0.0, 0.0, 0.0) for part in (a, b))
    return float((a - b).norm())


def _nudged(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements differ by a few units of rounding, up and down in turn."""
    if not tensor.is_floating_point():
        return tensor
    factors = torch.full_like(tensor, 1 + 4 * torch.finfo(tensor.dtype).eps).flatten()
    factors[::2] = 1 - 4 * torch.finfo(tensor.dtype).eps
    return tensor.detach() * factors.view(tensor.shape)
