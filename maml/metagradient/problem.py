"""The inner problem as a value: everything that a learner states for one task.

A task has parameters φ, which begin at ``start`` and adapt, and fixed parameters. With rates r_t
for each step t, the inner loop is

    φ ← φ + r_t ∘ optimizer's update(∇_φ [L_support(φ, …, t) + λ/2 ‖φ − start‖²])

and the outer loss is Σ_t w_t L_query(φ after step t, …). `maml.metagradient.differentiate` takes
the outer loss's gradient by every tensor of the problem.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from maml.metagradient.rules import OPTIMIZERS, Moment
from maml.ops.instead import instead
from maml.params import Params


class Loss(Protocol):
    """A loss of one task; pure, and made of operations that ``torch.func`` can batch."""

    def __call__(self, params: Params, task: Any, step: int) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and outputs ``[…]`` to compute metrics from.

        Args:
            params: Every parameter of the problem at this step: the adapted values of ``start``,
                ``fixed``, and this step's ``step_params``.
            task: One task: a `datasets.tasks.Task`, or any nest of tensors.
            step: For a support loss, the inner step that is taken, from 0. For a query loss, the
                last step that was taken; 0 where there was no step.
        """


def called(loss: Callable[..., Any], *arguments: Any) -> tuple[Tensor, Tensor]:
    """Call a loss, or a method that computes a loss, and return its loss and outputs.

    Raises:
        TypeError: if it returns anything else; the message names the loss.
    """
    # The mode costs each of torch's calls some microseconds, so a loss may enter it for itself.
    with contextlib.nullcontext() if getattr(loss, "calls_instead", False) else instead():
        found = loss(*arguments)
    is_pair = isinstance(found, tuple) and len(found) == 2
    is_scalar = is_pair and isinstance(found[0], Tensor) and not found[0].dim()
    if is_scalar and all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(found[1])):
        return found
    name = getattr(loss, "__qualname__", type(loss).__name__)
    owner = getattr(loss, "__self__", None)
    if owner is not None:  # a base class may define the method
        name = f"{type(owner).__name__}.{getattr(loss, '__name__', name)}"
    if is_pair and not is_scalar:
        raise TypeError(
            f"the loss is {_shape(found[0])}: it must be a tensor [], computed by torch, as the "
            f"mean over the examples ({name})"
        )
    raise TypeError(
        f"{name} returns {_shape(found)}: it must return (loss, outputs), a tensor and "
        "one or more, which metrics are computed of"
    )


def _shape(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"one tensor {list(found.shape)}"
    if isinstance(found, tuple):
        return f"({', '.join(_shape(each) for each in found)})"
    return f"a {type(found).__name__}"


class Implicit(NamedTuple):
    """Differentiate at the solution of the inner problem, not through the inner steps.

    iMAML, Rajeswaran et al. 2019, arXiv:1909.04630, algorithm 2.

    Attributes:
        cg_steps: Steps of conjugate gradient; 0: the query loss's gradient itself.
        cg_damping: δ of ((1 + δ) I + H/λ) g = ∇L_query.
        cg_lambda: λ in this equation; None: the pull's λ.
    """

    cg_steps: int
    cg_damping: float = 0.0
    cg_lambda: float | None = None


class Transform(NamedTuple):
    """A function that changes the inner gradients before the optimizer uses them.

    With the weights at hand, it can state any inner update: with "sgd" at a rate of 1, return the
    weights minus the new ones. Its own state is then in entries of `Problem.start` that no loss
    reads, as the cells of a learned optimizer.

    Attributes:
        function: ``(gradients {name: […]}, tensors) → gradients``, of one task; differentiable.
        tensors: What the function reads, ``{name: […]}``. They get a gradient of the outer loss.
        weights: Whether the function takes as third argument what adapts, ``{name: […]}``.
    """

    function: Callable[..., Params]
    tensors: Params
    weights: bool = False

    def changed(self, gradients: Params, weights: Params) -> Params:
        """Return the gradients of one task after the change, each in the shape of its weight."""
        more = (dict(weights),) if self.weights else ()
        with instead():
            found = self.function(gradients, self.tensors, *more)
        if missing := gradients.keys() - found.keys():
            raise ValueError(f"the transform returns no gradient of {min(missing)!r}")
        return {n: torch.as_tensor(found[n]).to(g).expand_as(g) for n, g in gradients.items()}


@dataclass(frozen=True)
class Problem:
    """An inner problem and its outer loss. Tensors may have a graph that leads to meta-parameters.

    Attributes:
        start: Initial values of what adapts: ``{name: […]}``, the same for all tasks.
        support: The loss that the inner loop minimises.
        query: The outer loss.
        optimizer: The inner optimizer, a key of `OPTIMIZERS`.
        lr: Its learning rate.
        steps: Inner-loop steps.
        order: "second" differentiates through the inner gradients (arXiv:1703.03400, equation 1);
            "first" takes them as constants (section 5.2, first-order approximation).
        fixed: Parameters that the losses read and that do not adapt: ``{name: […]}``.
        rates: For each step, factors of the updates: ``{name: […]}`` for every name of ``start``,
            of a shape that broadcasts against it (one number per tensor, or one per element).
            None: no factors.
        transform: Changes the gradients before the optimizer uses them; None: no change.
        step_params: For each step, parameters of only that step, ``{name: […]}``. All steps have
            the same names. They do not adapt. The query loss after a step reads that step's.
        query_weights: w_t of the query loss after each step. None or empty: only the last counts.
        proximal: λ of the pull towards ``start``.
        pull: "each-step", or "end": after all other steps, one step of gradient descent on only
            λ/2 ‖φ − start‖². "end" needs ``implicit``, where it does not matter how φ was found.
        implicit: How to differentiate at the solution; None: through the loop.
        displacement: Whether the gradient by ``start`` is ``start`` minus the loop's end, not the
            query loss's gradient (Reptile, arXiv:1803.02999).
        second_moment: The initial second moment of ``optimizer`` "adam0", for every name of
            ``start``, and its weight ``[]``. Its gradient is its displacement, so `differentiate`
            requires ``displacement``. None: each task begins with an empty moment.
        snapshots: How many states of the loop (what adapts, and the optimizer's state) to keep for
            the way back, in addition to the first. The other states and each step's activations are
            computed again, so memory does not grow with the steps. None: keep all states.
        lives_on: Whether to return `Outer.end`: the end of the single task's loop, so that another
            problem may begin there.
        optimizer_state: The initial optimizer state of the single task's loop, a constant:
            `End.optimizer_state` of another problem. None: a fresh optimizer.
        momentum: β of ``optimizer`` "momentum": m' = β m + gradient.

    Raises:
        ValueError: for values that do not go together.
    """

    start: Params
    support: Loss
    query: Loss
    optimizer: str = "sgd"
    lr: float = 0.01
    steps: int = 1
    order: str = "second"
    fixed: Params = dataclasses.field(default_factory=dict)
    rates: Sequence[Params] | None = None
    transform: Transform | None = None
    step_params: Sequence[Params] = ()
    query_weights: Sequence[float] | None = None
    proximal: float = 0.0
    pull: str = "each-step"
    implicit: Implicit | None = None
    displacement: bool = False
    second_moment: Moment | None = None
    snapshots: int | None = None
    lives_on: bool = False
    optimizer_state: Any = None
    momentum: float = 0.9

    def __post_init__(self) -> None:
        numbers = (self.lr, self.proximal, *(self.query_weights or ()))
        if any(isinstance(number, Tensor) for number in numbers):
            raise ValueError(
                "lr, proximal and query_weights are plain numbers and do not learn; put learned "
                "rates into rates"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r}: one of {', '.join(OPTIMIZERS)}")
        if self.order not in ("first", "second"):
            raise ValueError(f"order {self.order!r}: first or second")
        for name in ("steps", "snapshots"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: at least 0")
        for name in ("rates", "step_params", "query_weights"):
            stated = getattr(self, name)
            if stated and len(stated) != self.steps:
                raise ValueError(f"{name}: {len(stated)} of them for {self.steps} steps")
        if self.rates and any(rates.keys() != self.start.keys() for rates in self.rates):
            raise ValueError("rates: each step's must have the names of start")
        groups = [self.start, self.fixed, *self.step_params[:1]]
        if sum(map(len, groups)) != len(set().union(*groups)):
            raise ValueError("start, fixed and step_params share a name")
        if any(of_step.keys() != self.step_params[0].keys() for of_step in self.step_params):
            raise ValueError("step_params: each step's must have the same names")
        for group in (*groups, *(self.rates or ())[:1]):
            for name, tensor in group.items():
                if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                    what = getattr(tensor, "dtype", type(tensor).__name__)
                    raise ValueError(
                        f"{name} is {what}: the outer loss is differentiated by all that a problem "
                        "states, so it must be a floating-point tensor; let the losses close over "
                        "what is not"
                    )
        if self.pull not in ("each-step", "end"):
            raise ValueError(f"pull {self.pull!r}: each-step or end")
        if self.implicit is not None:
            self._check_implicit()
        elif self.pull == "end":
            raise ValueError("pull 'end': only with implicit")
        if self.displacement and (
            self.transform or self.step_params or self.query_weights or self.implicit
        ):
            raise ValueError(
                "displacement: not with transform, step_params, query_weights or implicit"
            )
        learned = [n for rates in self.rates or () for n in rates if rates[n].requires_grad]
        if self.displacement and learned:
            raise ValueError(f"displacement: it has no gradient by the rate of {learned[0]}")
        if self.is_part and (self.implicit or self.displacement):
            raise ValueError("lives_on, optimizer_state: not with implicit or displacement")
        second = self.second_moment
        if second is not None and self.optimizer != "adam0":
            raise ValueError(f"second_moment: for optimizer 'adam0', not {self.optimizer!r}")
        if second is not None and second.total.keys() != self.start.keys():
            raise ValueError("second_moment: it must have the names of start")

    def _check_implicit(self) -> None:
        for name in ("rates", "transform", "step_params", "query_weights"):
            if getattr(self, name):
                raise ValueError(f"implicit: not with {name}")
        if self.proximal <= 0:
            raise ValueError("implicit: proximal must be above 0, or start has no effect")
        if self.order == "first":
            raise ValueError("implicit: not with order 'first'; cg_steps=0 ignores curvature")

    def params(self, adapted: Params, step: int) -> Params:
        """Return what the losses read at ``step``: ``adapted``, ``fixed`` and ``step_params``."""
        of_step = self.step_params[step] if self.step_params else {}
        return {**adapted, **self.fixed, **of_step}

    def query_weight(self, step: int) -> float:
        """Return w of the query loss after ``step``."""
        if not self.query_weights:
            return float(step == self.last_step)
        return float(self.query_weights[step])

    @property
    def pull_of_steps(self) -> float:
        """λ of the pull in each step."""
        return self.proximal if self.pull == "each-step" else 0.0

    def pulled_at_end(self, weights: Params, start: Params) -> Params:
        """Return ``weights`` after the pull towards ``start`` at the end of the loop, if any."""
        if self.pull == "each-step":
            return weights
        by = self.lr * self.proximal
        return {name: w - by * (w - start[name]) for name, w in weights.items()}

    @property
    def is_part(self) -> bool:
        """Whether another problem continues this problem, or this problem continues another."""
        return self.lives_on or self.optimizer_state is not None

    @property
    def last_step(self) -> int:
        """The step whose parameters the last query loss reads."""
        return max(self.steps - 1, 0)

    def tensors(self) -> Tensors:
        """Return all tensors that the outer loss can be differentiated by."""
        own = {} if self.transform is None else self.transform.tensors
        moment: Params = {}
        if self.second_moment is not None:
            moment = by_name(self.second_moment)
        rates, step_params = list(self.rates or ()), list(self.step_params)
        return Tensors(self.start, self.fixed, rates, step_params, own, moment)

    def at(self, tensors: Tensors) -> Problem:
        """Return the same problem with other tensors; not for a problem with ``second_moment``."""
        return dataclasses.replace(
            self,
            start=tensors.start,
            fixed=tensors.fixed,
            rates=None if self.rates is None else tensors.rates,
            step_params=tensors.step_params,
            transform=self.transform and self.transform._replace(tensors=tensors.transform),
        )


class Tensors(NamedTuple):
    """The tensors of a problem, or their gradients: see `Problem`'s attributes of these names."""

    start: Params
    fixed: Params
    rates: list[Params]
    step_params: list[Params]
    transform: Params = {}
    second_moment: Params = {}

    def pull_back(self, gradients: Tensors, by: Params) -> Params:
        """Return the gradient by the meta-parameters that these tensors were made of.

        Args:
            gradients: The outer loss's gradients by these tensors.
            by: The meta-parameters ``{name: […]}``, leaves of the tensors' graph.

        Raises:
            RuntimeError: for a meta-parameter that no tensor depends on: a mistake, not a zero.
        """
        made, cotangents = [], []
        for own, theirs in zip(self._groups(), gradients._groups(), strict=True):
            for name, tensor in own.items():
                if tensor.requires_grad:
                    made.append(tensor)
                    cotangents.append(theirs[name])
        # A shortcut: most problems contain the meta-parameters themselves. For a tiny network,
        # autograd would take 5 % of a step to get the same result.
        by_tensor = {
            id(tensor): gradient for tensor, gradient in zip(made, cotangents, strict=True)
        }
        if len(made) == len(by_tensor) and by_tensor.keys() == {id(leaf) for leaf in by.values()}:
            return {name: by_tensor[id(leaf)] for name, leaf in by.items()}
        found = torch.autograd.grad(made, tuple(by.values()), cotangents)
        return dict(zip(by, found, strict=True))

    def _groups(self) -> list[Params]:
        own = [self.transform, self.second_moment]
        return [self.start, self.fixed, *self.rates, *self.step_params, *own]


_WEIGHT = "weight of the second moment"
"""The weight's name in `Tensors`; it is unique, because names of parameters have no blanks."""


def by_name(moment: Moment) -> Params:
    """Return a moment's tensors by name, in the form of `Tensors.second_moment`."""
    return {**moment.total, _WEIGHT: torch.as_tensor(moment.weight)}


class End(NamedTuple):
    """The end of a task's inner loop, without a graph.

    Attributes:
        params: ``{name: […]}``, the adapted parameters.
        optimizer_state: The inner optimizer's state, in the form of `Problem.optimizer_state`.
    """

    params: Params
    optimizer_state: Any


class Outer(NamedTuple):
    """Like `OuterGradient` in `maml.metagradient.differentiate`, but by the problem's tensors."""

    gradients: Tensors
    losses: Tensor
    outputs: Any
    end: End | None = None
