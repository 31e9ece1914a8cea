"""The meta-gradient of an inner loop, forward over reverse.

Reverse mode through the inner loop keeps the graphs of all steps. This module keeps only the loop's
trajectory of weights, and pulls the outer loss's gradient back through one step after another:

    v ← (∂φ'/∂φ)ᵀ v + H (∂φ'/∂g)ᵀ v,        φ' = optimizer(φ, g),  g = ∇_φ L_support.

H differentiates the support loss's gradient by *all* parameters. Its product with a direction in φ
is a forward derivative (MixFlow-MG, arXiv:2505.00793). The result is the same number as in reverse
mode: only the order of the products differs. v is the cotangent of all parameters: of φ, of fixed
parameters, and of a step's own parameters. The rows of fixed parameters only accumulate. The rows
of a step's own parameters are taken out at the beginning of that step.
"""

from math import comb
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from maml.metagradient.by_task import Batching, each_task, n_tasks_of
from maml.metagradient.function import Derivatives, grad
from maml.metagradient.problem import End, Outer, Problem, Tensors, Transform
from maml.metagradient.rules import Rule, make_rule
from maml.params import Params, sum_rows

REMEMBERED_STEPS = 16
"""A loop of at most this many steps keeps each step's activations for the way back. A longer loop,
or a problem with ``snapshots``, computes them again. To first order no step needs activations."""


class _Transformed:
    """``gradients``: inner gradients after a `Problem.transform`."""

    def __init__(
        self, transform: Transform, derivatives: Derivatives, gradients: Params, weights: Params
    ) -> None:
        with torch.enable_grad():
            inputs = gradients, weights if transform.weights else {}, transform.tensors
            self._inputs: tuple[Params, Params, Params] = pytree.tree_map(
                lambda t: t.detach().requires_grad_(), inputs
            )
            before, at, tensors = self._inputs
            batching: Batching = "tasks" if derivatives.alone else "vmap"
            each = each_task(transform._replace(tensors=tensors).changed, batching)
            self._after = each(before, at)
        self.gradients = {name: tensor.detach() for name, tensor in self._after.items()}

    def pull_back(self, v: Params, scale: float) -> tuple[Params, Params, Params]:
        """Pull ``scale`` times v back to gradients, weights, and tensors (summed over tasks)."""
        inputs, structure = pytree.tree_flatten(self._inputs)
        along = [scale * v[name] for name in self._after]
        found = grad([*self._after.values()], inputs, along)
        of_inputs: tuple[Params, Params, Params] = pytree.tree_unflatten(found, structure)
        return of_inputs


class _Taken(NamedTuple):
    """Results of a step: the point of its gradient, the transformed gradient, and the rule."""

    point: Any
    transformed: _Transformed | None
    rule: Rule


class _Step(NamedTuple):
    """A step for the way back: the state at its beginning, and its results if remembered."""

    at: Params
    state: Any
    taken: _Taken | None


@torch.no_grad()
def step_by_step(problem: Problem, tasks: Any, derivatives: Derivatives) -> Outer:
    """Differentiate the outer loss of B tasks by the problem's tensors."""
    return _Loop(problem, tasks, derivatives).differentiate()


@torch.no_grad()
def adapt(problem: Problem, tasks: Any, derivatives: Derivatives) -> tuple[Params, Any]:
    """Return all parameters after the inner loop of each task, and the optimizer's state."""
    loop = _Loop(problem, tasks, derivatives, differentiated=False)
    at, state = loop.forward()
    return problem.pulled_at_end(at, loop.start), state


class _Loop:
    """The inner loops of B tasks, to be ``differentiated`` or not."""

    def __init__(
        self, problem: Problem, tasks: Any, derivatives: Derivatives, *, differentiated: bool = True
    ) -> None:
        self.problem, self.tasks, self.derivatives = problem, tasks, derivatives
        self.rule = make_rule(
            problem.optimizer, problem.lr, problem.momentum, problem.second_moment
        )
        self.differentiated = differentiated
        self.start = self._of_each(derivatives.laid_out(problem.params(problem.start, 0)))
        self.second = problem.order == "second"
        few = problem.steps <= REMEMBERED_STEPS or not self.second
        self.remember = few and problem.snapshots is None
        self.kept: dict[int, _Step] = {}
        self.v: Params = {}
        self.v_state: Any = None
        self.of_rates: list[Params] = []
        self.of_steps: list[Params] = []
        tensors = problem.tensors().transform
        self.of_transform = {name: torch.zeros_like(t) for name, t in tensors.items()}
        self.pulled_to_start: Params = {}

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
            transformed = _Transformed(self.problem.transform, self.derivatives, gradients, weights)
            gradients = transformed.gradients
        rates = None if self.problem.rates is None else self.problem.rates[step]
        rule = self.rule(weights, gradients, state, rates)
        return _Taken(support.point, transformed, rule)

    def _of_each(self, params: Params) -> Params:
        """Expand tensors that tasks share to ``{name: [B, …]}``, without a copy (stride 0)."""
        n_tasks = n_tasks_of(self.tasks)
        return {name: tensor.expand(n_tasks, *tensor.shape) for name, tensor in params.items()}

    def forward(self) -> tuple[Params, Any]:
        """Take all steps; return all parameters after them, and the optimizer's state."""
        return self._advance(0, self.start, self.problem.optimizer_state, self.problem.steps)

    def _advance(self, first: int, at: Params, state: Any, end: int) -> tuple[Params, Any]:
        """Take the steps from ``first`` to before ``end``, and keep what the way back needs."""
        keep = set(range(first, end)) if self.differentiated else set()
        if keep and self.problem.snapshots is not None:
            room = self.problem.snapshots - len(self.kept.keys() - {0})
            # On the way back, the state at ``end`` is visited next. In the first pass, the last
            # state is visited next, and it costs nothing to keep: it is at hand.
            asked, at_hand = (end + 1, set[int]()) if self.kept else (end - 1, {end - 1})
            keep = _kept_between(first, asked, room) | at_hand
        for step in range(first, end):
            if self.problem.step_params:
                at = at | self._of_each(self.problem.step_params[step])
            remember = self.differentiated and self.second and self.remember
            taken = self._take(step, at, state, remember)
            if step in keep:
                self.kept[step] = _Step(at, state, taken if self.remember else None)
            moved, state = taken.rule.after
            at = at | moved
            del taken  # it holds what the step began with
        return at, state

    def _began(self, step: int) -> _Step:
        """Return ``step``, the last step that the way back has not visited yet."""
        nearest = max(self.kept)
        if nearest == step:
            return self.kept.pop(step)
        at, state = self._advance(nearest, self.kept[nearest].at, self.kept[nearest].state, step)
        if self.problem.step_params:
            at = at | self._of_each(self.problem.step_params[step])
        return _Step(at, state, None)

    def differentiate(self) -> Outer:
        """Take all steps, then go back through them."""
        problem, last = self.problem, self.problem.last_step
        at, state = self.forward()
        end = End({n: at[n][0] for n in problem.start}, state) if problem.lives_on else None
        query = self.derivatives.gradient("query", at, self.tasks, last, again=False)
        del at, state
        weight, outputs = problem.query_weight(last), query.outputs
        self.v, self.losses = query.gradients, query.losses
        if weight != 1:
            self.v = {name: weight * tensor for name, tensor in self.v.items()}
            self.losses = weight * self.losses
        del query
        for step in reversed(range(problem.steps)):
            self._back(step)
        v = self.v
        if not problem.steps:
            v = {name: sum_rows(tensor) for name, tensor in v.items()}
        pulled = self.pulled_to_start
        v = {n: t + pulled[n] if n in pulled else t for n, t in v.items()}
        gradients = Tensors(
            {name: v[name] for name in problem.start},
            {name: v[name] for name in problem.fixed},
            self.of_rates,
            self.of_steps,
            self.of_transform,
        )
        return Outer(gradients, self.losses, outputs, end)

    def _back(self, step: int) -> None:
        """Go back through ``step``, the last step that is left."""
        problem = self.problem
        began = self._began(step)
        taken = began.taken or self._take(step, began.at, began.state, self.second)
        at, point = began.at, taken.point
        moving = {name: self.v.pop(name) for name in problem.start}
        moved = taken.rule.pull_back(moving, self.v_state)
        u, scale, of_weights = moved.gradients, moved.scale, moved.weights
        if taken.transformed is not None:
            u, more, of_step = taken.transformed.pull_back(u, scale)
            scale, of_weights = 1.0, of_weights | {n: of_weights[n] + t for n, t in more.items()}
            self.of_transform = {n: t + self.of_transform[n] for n, t in of_step.items()}
        self.v, self.v_state = self.v | of_weights, moved.state
        if problem.rates is not None and moved.rates is not None:
            shapes = {name: rate.shape for name, rate in problem.rates[step].items()}
            self.of_rates.insert(0, {n: moved.rates[n].sum_to_size(s) for n, s in shapes.items()})
        del began, taken, moving, moved  # the optimizer's state and the next tensors are large
        # All tasks share the start of the first step: only the sum over tasks is needed.
        first = step == 0
        if first:
            self.v = {name: sum_rows(tensor) for name, tensor in self.v.items()}
        if self.second:
            product = self.derivatives.hessian_vector(point, u, total=first, scale=scale)
            self.v = {n: t + product[n] for n, t in self.v.items()}
            if problem.proximal:
                for name, along in u.items():
                    pull = (problem.proximal * scale) * sum_rows(along)
                    of_each = pull if first else problem.proximal * scale * along
                    self.v[name] = self.v[name] + of_each
                    self.pulled_to_start[name] = self.pulled_to_start.get(name, 0) - pull
        if problem.step_params:
            self.of_steps.insert(0, self._take_out(step, summed=first))
        if step and problem.query_weight(step - 1):
            if problem.step_params:
                at = at | self._of_each(problem.step_params[step - 1])
            early = self.derivatives.gradient("query", at, self.tasks, step - 1, again=False)
            weight, gradients = problem.query_weight(step - 1), early.gradients
            self.v = {n: torch.add(t, gradients[n], alpha=weight) for n, t in self.v.items()}
            self.losses = self.losses + weight * early.losses

    def _take_out(self, step: int, *, summed: bool) -> Params:
        """Return Σ over tasks of v's rows of `step_params`; zero these rows unless ``summed``."""
        own = {name: self.v[name] for name in self.problem.step_params[step]}
        if summed:
            return own
        self.v = self.v | {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        return {name: sum_rows(tensor) for name, tensor in own.items()}


def _kept_between(first: int, end: int, room: int) -> set[int]:
    """Return which of the states ``first`` … ``end - 1`` to keep: ``first``, at most ``room`` more.

    States are visited from the last to the first. A state that is not kept is computed again from
    an earlier state, and other states are kept on that way. This choice takes as few steps twice
    as possible (Griewank and Walther 2000, doi:10.1145/347837.347846, revolve).
    """
    kept = {first}
    while room > 0 and end - first > 1:
        n, times = end - first, 0
        while comb(room + 1 + times, times) < n:  # states in reach with so many repetitions
            times += 1
        first += min(comb(room + times, times - 1), n - comb(room + times - 1, times - 1))
        kept.add(first)
        room -= 1
    return kept
