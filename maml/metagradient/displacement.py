"""The meta-gradient of Reptile: from where the inner loop ends back to where it began.

Reptile (Nichol et al. 2018, arXiv:1803.02999, algorithm 1) moves the start θ towards the end φ of a
task's inner loop: as a step along the gradient θ − φ, which is that of ½ ‖θ − φ‖² with φ taken as a
constant. Nothing is differentiated, so memory does not grow with the inner steps.

Adam's second moment, where it begins as something, moves in the same way: from task to task of the
released code; here to the mean over tasks, so that their order does not matter.
"""

from typing import Any

import torch

from maml.kernels.derivatives import Derivatives
from maml.metagradient.forward_over_reverse import adapt
from maml.metagradient.problem import Outer, Problem, Tensors, by_name
from maml.metagradient.rules import Moment
from maml.params import Params, sum_rows


@torch.no_grad()
def displaced(problem: Problem, tasks: Any, derivatives: Derivatives) -> Outer:
    """Return θ − φ, summed over B tasks; the query loss is what is reported."""
    at, state = adapt(problem, tasks, derivatives)
    query = derivatives.gradient("query", at, tasks, problem.last_step, again=False)
    start = derivatives.enter(problem.params(problem.start, 0))
    apart = derivatives.leave({name: sum_rows(start[name] - end) for name, end in at.items()})
    of_moment: Params = {}
    if problem.second_moment is not None:
        of_moment = _moved(problem.second_moment, state.second, derivatives, len(query.losses))
    still = {name: torch.zeros_like(tensor) for name, tensor in problem.fixed.items()}
    # Learned rates have no such gradient: whoever asks for it is told of the mistake.
    rates: list[Params] = [{} for _ in problem.rates or ()]
    gradients = Tensors(
        {name: apart[name] for name in problem.start}, still, rates, [], second_moment=of_moment
    )
    return Outer(gradients, query.losses, query.outputs)


def _moved(start: Moment, end: Moment, derivatives: Derivatives, n_tasks: int) -> Params:
    """Return what B tasks have moved a second moment by, reversed, as `by_name`."""
    ends = derivatives.leave({name: sum_rows(tensor) for name, tensor in end.total.items()})
    for name in start.total.keys() & set(derivatives.absent):
        ends[name] = (n_tasks * end.kept) * start.total[name]  # its gradients are zero
    total = {name: n_tasks * tensor - ends[name] for name, tensor in start.total.items()}
    return by_name(Moment(total, n_tasks * (start.weight - end.weight)))
