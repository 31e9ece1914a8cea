"""The meta-gradient of Reptile: from where the inner loop ends back to where it began.

Reptile (Nichol et al. 2018, arXiv:1803.02999, algorithm 1) moves the start θ towards the end φ of a
task's inner loop: as a step along the gradient θ − φ, which is that of ½ ‖θ − φ‖² with φ taken as a
constant. Nothing is differentiated, so memory does not grow with the inner steps.
"""

from __future__ import annotations

from typing import Any

import torch

from maml.kernels.derivatives import Derivatives
from maml.metagradient.forward_over_reverse import adapt
from maml.metagradient.problem import Outer, Problem, Tensors
from maml.params import Params


@torch.no_grad()
def meta_gradient(problem: Problem, tasks: Any, derivatives: Derivatives) -> Outer:
    """Return θ − φ, summed over B tasks; the query loss is what is reported.

    Args:
        problem: The problem, whose `Problem.displacement` asks for it.
        tasks: B tasks.
        derivatives: Of its losses.
    """
    at = adapt(problem, tasks, derivatives)
    query = derivatives.gradient("query", at, tasks, problem.last_step, again=False)
    start = derivatives.enter(problem.params(problem.start, 0))
    apart = derivatives.leave({name: (start[name] - end).sum(0) for name, end in at.items()})
    still = {name: torch.zeros_like(tensor) for name, tensor in problem.fixed.items()}
    # Of rates that are learned there is none: a mistake, which is told where it is asked for.
    rates: list[Params] = [{} for _ in problem.rates or ()]
    gradients = Tensors({name: apart[name] for name in problem.start}, still, rates, [])
    return Outer(gradients, query.losses, query.outputs)
