"""The meta-gradient of an inner loop, forward over reverse.

Reverse mode through the inner loop keeps the graphs of all steps. Here the loop's trajectory of
weights is kept, and the outer loss's gradient is pulled back through one step after another,

    v ← (∂φ'/∂φ)ᵀ v + H (∂φ'/∂g)ᵀ v,        φ' = optimizer(φ, g),  g = ∇_φ L_support,

where the product with H, the derivative of the support loss's gradient by *all* parameters along a
direction in φ, is a forward derivative (MixFlow-MG, arXiv:2505.00793). It is the same number: only
the order of the products differs. v is the cotangent of all parameters: of φ, of what stands still
(whose rows of v only grow), and of a step's own parameters, whose rows are taken out where that
step began.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from maml.kernels.derivatives import Derivatives, Gradient, of_each_task
from maml.metagradient.adam import Moment
from maml.metagradient.problem import Outer, Problem, Tensors
from maml.metagradient.rules import Rule, make_rule
from maml.metagradient.transformed import Transformed
from maml.params import Params, sum_rows

REMEMBERED_STEPS = 8
"""Up to here each step's activations are kept for its way back; beyond, they are computed once
more, and memory grows with the steps by the weights alone."""


class _Taken(NamedTuple):
    """What was computed at a step: the point of its gradient, what that became, the rule."""

    point: Any
    transformed: Transformed | None
    rule: Rule


class _Step(NamedTuple):
    """What the way back needs of a step: where it began, and what was computed, if remembered."""

    at: Params
    state: Any
    taken: _Taken | None


@torch.no_grad()
def step_by_step(problem: Problem, tasks: Any, derivatives: Derivatives) -> Outer:
    """Differentiate the outer loss of B tasks by the problem's tensors.

    Args:
        problem: The problem.
        tasks: B tasks.
        derivatives: Of its losses.
    """
    return _Loop(problem, tasks, derivatives).differentiate()


@torch.no_grad()
def adapt(problem: Problem, tasks: Any, derivatives: Derivatives) -> Params:
    """Return all parameters after the inner loop of each task, in the derivatives' coordinates."""
    return ends(problem, tasks, derivatives)[0]


@torch.no_grad()
def ends(problem: Problem, tasks: Any, derivatives: Derivatives) -> tuple[Params, Any]:
    """Return what `adapt` does, and the inner optimizer's state in the same coordinates."""
    loop = _Loop(problem, tasks, derivatives, differentiated=False)
    at, state = loop.forward()
    return problem.pulled_at_end(at, loop.start), state


class _Loop:
    """The inner loops of B tasks, to be ``differentiated`` or not."""

    def __init__(
        self, problem: Problem, tasks: Any, derivatives: Derivatives, *, differentiated: bool = True
    ) -> None:
        self.problem, self.tasks, self.derivatives = problem, tasks, derivatives
        learned = any(rate.requires_grad for of in problem.rates or () for rate in of.values())
        second = problem.second_moment
        if second is not None:
            second = Moment(self._of_start(second.total), second.weight)
        self.rule = make_rule(
            problem.optimizer, problem.lr,
            learned_rates=learned, differentiated=differentiated, second=second,
        )  # fmt: skip
        self.differentiated = differentiated
        self.rates = [self._own_rates(step) for step in range(problem.steps)]
        shared = derivatives.enter(problem.params(problem.start, 0))
        self.start = of_each_task(shared, n_tasks_of(tasks))
        self.second = problem.order == "second"
        self.remember = problem.steps <= REMEMBERED_STEPS
        self.steps: list[_Step] = []

    def _own_rates(self, step: int) -> Params | None:
        """Return a step's rates in the derivatives' coordinates; None: the updates as they are."""
        problem, still = self.problem, not (self.problem.fixed or self.problem.step_params)
        stated = None if problem.rates is None else problem.rates[step]
        if not self.derivatives.whole:
            return stated
        if stated is None and still:
            return None
        if stated is None:
            stated = {name: torch.ones_like(tensor) for name, tensor in problem.start.items()}
        return self._of_start(stated)

    def _of_start(self, values: Params) -> Params:
        """Return a value for each element of the start in the derivatives' coordinates.

        Where those are of all parameters, what stands still has zero.
        """
        if not self.derivatives.whole:
            return values
        params = self.problem.params(self.problem.start, 0)
        return self.derivatives.enter(
            {
                name: values[name].expand_as(t) if name in values else torch.zeros_like(t)
                for name, t in params.items()
            }
        )

    def _take(self, step: int, at: Params, state: Any, again: bool) -> _Taken:
        support = self.derivatives.gradient("support", at, self.tasks, step, again=again)
        gradients = support.gradients
        weights = {name: at[name] for name in gradients}
        if self.problem.pull_of_steps:
            gradients = {
                name: torch.add(g, weights[name] - self.start[name], alpha=self.problem.proximal)
                for name, g in gradients.items()
            }
        transformed = None
        if self.problem.transform is not None:
            transformed = Transformed(self.problem, self.derivatives, gradients)
            gradients = transformed.gradients
        rule = self.rule(weights, gradients, state, self.rates[step])
        return _Taken(support.point, transformed, rule)

    def forward(self) -> tuple[Params, Any]:
        """Take all steps; return all parameters at their end, and the optimizer's state."""
        keep = self.differentiated
        at, state = self.start, None
        for step in range(self.problem.steps):
            if self.problem.step_params:
                at = self.derivatives.put(at, self.problem.step_params[step])
            taken = self._take(step, at, state, keep and self.second and self.remember)
            if keep:
                self.steps.append(_Step(at, state, taken if self.remember else None))
            at, state = at | taken.rule.weights, taken.rule.state
        return at, state

    def differentiate(self) -> Outer:
        """Take all steps, and come back."""
        problem, derivatives = self.problem, self.derivatives
        last = problem.last_step
        at, _ = self.forward()
        query = derivatives.gradient("query", at, self.tasks, last, again=False)
        weight = problem.query_weight(last)
        v, losses = _scaled(query.gradients, weight), query.losses
        losses = losses if weight == 1 else weight * losses
        v_state: Any = None
        of_rates: list[Params] = []
        of_steps: list[Params] = []
        pulled_to_start: Params = {}
        of_transform: Params = {}
        if problem.transform is not None and not problem.steps:
            of_transform = {n: torch.zeros_like(t) for n, t in problem.transform.tensors.items()}
        for step in reversed(range(problem.steps)):
            began = self.steps.pop()
            taken = began.taken or self._take(step, began.at, began.state, self.second)
            moved = taken.rule.pull_back({name: v[name] for name in taken.rule.weights}, v_state)
            if taken.transformed is not None:
                u, of_step = taken.transformed.pull_back(moved.gradients, moved.scale)
                moved = moved._replace(gradients=u, scale=1.0)
                of_transform = {n: t + of_transform.get(n, 0) for n, t in of_step.items()}
            v, v_state = v | moved.weights, moved.state
            if problem.rates is not None:
                of_rates.insert(0, self._of_rates(step, moved.rates))
            # At the first step the tasks meet, at what they share: only their sum is asked.
            first = step == 0
            if first:
                v = {name: sum_rows(tensor) for name, tensor in v.items()}
            if self.second:
                u, scale = moved.gradients, moved.scale
                product = derivatives.hessian_vector(taken.point, u, total=first)
                v = {n: torch.add(t, product[n], alpha=scale) for n, t in v.items()}
                if problem.proximal:
                    for name, along in u.items():
                        pull = (problem.proximal * scale) * sum_rows(along)
                        v[name] = v[name] + (pull if first else problem.proximal * scale * along)
                        pulled_to_start[name] = pulled_to_start.get(name, 0) - pull
            if problem.step_params:
                own, v = self._take_out(step, v, summed=first)
                of_steps.insert(0, own)
            if step and problem.query_weight(step - 1):
                early = self._query_before(step, began.at)
                weight = problem.query_weight(step - 1)
                v = {n: torch.add(t, early.gradients[n], alpha=weight) for n, t in v.items()}
                losses = losses + weight * early.losses
        if not problem.steps:
            v = {name: sum_rows(tensor) for name, tensor in v.items()}
        v = {n: t + pulled_to_start[n] if n in pulled_to_start else t for n, t in v.items()}
        left = derivatives.leave(v)
        gradients = Tensors(
            {name: left[name] for name in problem.start},
            {name: left[name] for name in problem.fixed},
            of_rates,
            of_steps,
            of_transform,
        )
        return Outer(gradients, losses, query.outputs)

    def _query_before(self, step: int, at: Params) -> Gradient:
        """Differentiate the query loss after the step before, by that step's parameters."""
        if self.problem.step_params:
            at = self.derivatives.put(at, self.problem.step_params[step - 1])
        return self.derivatives.gradient("query", at, self.tasks, step - 1, again=False)

    def _of_rates(self, step: int, gradients: Params | None) -> Params:
        """Return the gradient of a step's rates, each of its own shape, if they are learned."""
        assert self.problem.rates is not None
        if gradients is None:
            return {}
        rates = self.problem.rates[step]
        found = self.derivatives.leave(gradients) if self.derivatives.whole else gradients
        return {name: found[name].sum_to_size(rate.shape) for name, rate in rates.items()}

    def _take_out(self, step: int, v: Params, *, summed: bool) -> tuple[Params, Params]:
        """Return Σ over tasks of a step's own parameters' rows of v, and v with zeros there."""
        total = v if summed else {name: sum_rows(tensor) for name, tensor in v.items()}
        of_step = self.problem.step_params[step]
        own = {name: self.derivatives.leave(total)[name] for name in of_step}
        nothing = {name: torch.zeros_like(tensor) for name, tensor in of_step.items()}
        if summed:
            return own, v
        return own, self.derivatives.put(v, nothing)


def n_tasks_of(tasks: Any) -> int:
    """Return B of B tasks."""
    return len(torch.utils._pytree.tree_leaves(tasks)[0])


def _scaled(params: Params, by: float) -> Params:
    return params if by == 1 else {name: by * tensor for name, tensor in params.items()}
