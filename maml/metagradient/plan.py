"""The one place that decides how tasks are computed: all at once, or one by one, and why.

All at once means ``torch.func.vmap``, if it computes the same as a loop over the tasks.

It may not (torch 2.15): an embedding's padding affects only the first task, norms called by
``torch.ops`` are wrong, and some operations cannot be batched at all. So a loss that this project
did not write is computed in both ways on some tasks before vmap is trusted. What the losses keep
must also be what a loop keeps. The trial leaves nothing behind (`maml.execution.trial`).
"""

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from datasets.generators import kept, state
from maml.execution.compiled import DRAWS, KEEPS
from maml.execution.outside import COUNTING, Reached, outside_of
from maml.execution.trial import Trial
from maml.metagradient import draws
from maml.metagradient.by_task import Batching, Way
from maml.metagradient.differentiate import meta_gradient
from maml.metagradient.problem import Problem
from maml.params import Params

T = TypeVar("T")
ROUNDING = 8000
"""Two results agree if they differ by at most so many units of rounding of their norm: in float32,
by a thousandth. Both ways of a small network with group norms differed by 114 units in 12 steps."""
DRAWN = "in randomness error mode"
"""A part of the message of torch's RuntimeError when a batched loss draws a random number."""


class NotRepeatedError(ValueError):
    """Two calls with the same tasks give two results: a loss counts its calls, say."""


@dataclass
class Plan:
    """How the tasks of a problem are computed. What a call finds out may change the plan.

    Attributes:
        batching: "vmap": all at once; "tasks": one by one.
        draws: Whether the losses draw random numbers, as dropout does (`draws`).
        shares: Whether each call writes what threads would share (`maml.execution.outside`). None:
            unknown; the next call finds out, in one thread.
        heavy: Whether one task is enough work for a core.
        fills: Whether vmap would write what a repeated loop does not. This may be a cache, which
            the next call in a loop fills, so then it may be batched.
        settled: Whether no further call decides again.
        code: What compiles the problem, by what the problem reaches.
        told: Whether a line has said why nothing is compiled.
    """

    batching: Batching
    draws: bool = False
    shares: bool | None = None
    heavy: bool = False
    fills: bool = False
    settled: bool = True
    code: dict[Any, Any] = field(default_factory=dict)
    told: bool = False

    def why(self, what: str) -> str | None:
        """Return why tasks are computed one by one, of code that is called ``what``; else None."""
        if self.batching == "vmap":
            return None
        if self.draws:
            return f"{what} draws random numbers (one core each: --workers N)"
        if self.heavy:
            return "one task is work enough for a core"
        return f"torch.func.vmap cannot batch {what}, or finds another gradient"

    def compiles(self, *, says: bool, other: str | None = None) -> bool:
        """Return whether code may compute all tasks at once. ``says``: one line says why not.

        One task shows no difference between the ways, so it may. ``other``: another reason.
        """
        decided = self.settled or self.fills
        if self.draws or self.shares:
            other = DRAWS if self.draws else KEEPS
        elif self.batching == "tasks" and not self.heavy and decided:
            other = "torch.func.vmap cannot batch the tasks"
        if other is not None and says and not self.told:
            print(f"warning: compile: {other}; computing without", file=sys.stderr, flush=True)
            self.told = True
        return other is None


class Plans:
    """The plans of some problems, each decided by the first calls that tell.

    Attributes:
        known: The latest plans, by what names a problem.
    """

    def __init__(self, most: int) -> None:
        """Keep the ``most`` latest plans. Networks that their names hold stay in memory."""
        self.known: OrderedDict[Any, Plan] = OrderedDict()
        self._most = most

    def of(self, key: Any, decide: Callable[[], Plan], *, tells: bool) -> Plan:
        """Return the plan of a problem. ``tells``: this call's tasks show whether vmap serves.

        A problem that fills what may be a cache is decided once more, after a call has filled it.
        """
        plan = self.known.get(key)
        if plan is None or (tells and not plan.settled):
            before, plan = plan, decide()
            plan.settled = tells and (not plan.fills or (before is not None and before.fills))
            plan.told = before is not None and before.told
            self.known[key] = plan
        self.known.move_to_end(key)
        if len(self.known) > self._most:
            self.known.popitem(last=False)
        return plan


def decide(
    problem_of: Callable[[Params], Problem],
    meta_params: Params,
    tasks: Any,
    way: Way = "auto",
    *,
    code: Any,
    owner: nn.Module | None = None,
    checked: bool = False,
    weigh: bool = False,
) -> Plan:
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
        return Plan("tasks")
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
            return Plan("tasks", draw, shares, heavy)
        trial.put_back()
        held = Reached(*roots)
        try:
            batched = by("vmap")
        except Exception as error:
            # A network may draw and then restore the generators.
            return Plan("tasks", DRAWN in str(error), shares=False)
        if not held.is_same():
            return Plan("tasks", fills=True)
        return Plan("vmap" if _agree(batched, loop) else "tasks", shares=False)


def without_draws(plan: Plan, compute: Callable[[], T], *, watched: bool = True) -> T | None:
    """Return what ``compute`` returns for tasks; None if tasks draw, or cannot be batched.

    If so, the plan is to compute them one by one, by the addresses of their draws. Torch refuses
    its own draws in a batch, but not those of numpy and Python, for which generators are
    ``watched``. A thread that makes tasks seeds them, which would look like a draw, so it waits.
    """
    try:
        with draws.alone() if watched else contextlib.nullcontext():
            before = state() if watched else 0
            found = compute()
            drawn = watched and state() != before
        if not drawn:
            return found
    except RuntimeError as error:
        if plan.batching == "tasks":
            raise
        # A later phase, or an answer, may draw or read a value. If it is another error, a task
        # alone raises it again.
        drawn = DRAWN in str(error)
    plan.draws, plan.batching = plan.draws or drawn, "tasks"
    return None


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
