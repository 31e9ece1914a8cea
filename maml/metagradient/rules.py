"""The optimizers of the inner loop: one step of each, and its way back.

A rule takes weights θ, gradients g and its state to new ``weights`` and ``state``, element by
element. What `maml.metagradient.forward_over_reverse` asks of it is the product of a cotangent with
its Jacobian, once: ``pull_back`` uses up what it is given, and what the rule was.
`maml.metagradient.unrolled` differentiates through it.

Adam is written out here: TorchOpt (0.7.3) computes its bias corrections 1 − βᵗ in float32, whatever
the dtype of the parameters. In float64 that moves the meta-gradient of three inner steps by 1e-6 to
1e-3 of itself. Here it is a number of Python, or for a moment that is another's a tensor.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from maml.params import Params

NOT_ZERO = 1e-16
"""Stands for an exactly zero gradient; its square is still a normal float32."""


class PulledBack(NamedTuple):
    """Cotangents before a rule: of the weights, of the gradients (times ``scale``), of the state.

    A rule that only scales need not touch every element. Those of learned rates are summed over
    tasks.
    """

    weights: Params
    gradients: Params
    scale: float
    state: Any
    rates: Params | None = None


class SGDRule:
    """m' = β m + g, θ' = θ − α r ∘ m', in closed form; without momentum β is 0, and no m is kept.

    The rates r may be one for each element: one that is zero stands still. Cotangents of the state
    are in units of −α.
    """

    def __init__(
        self, weights: Params, gradients: Params, state: Any, rates: Params | None, *,
        lr: float, beta: float = 0.0, learned: bool = False,
    ) -> None:  # fmt: skip
        self._lr, self._beta, self._rates, self._learned = lr, beta, rates, learned
        moment = gradients
        if state:
            moment = {n: torch.add(g, state[n], alpha=beta) for n, g in gradients.items()}
        self._moment = moment if learned else {}
        self.state: Any = moment if beta else ()
        self.weights = {
            name: torch.add(tensor, moment[name], alpha=-lr)
            if rates is None
            else torch.addcmul(tensor, rates[name], moment[name], value=-lr)
            for name, tensor in weights.items()
        }

    def pull_back(self, v: Params, v_state: Any) -> PulledBack:
        """Pull cotangents of weights and state (None: zero) back to before the rule."""
        v_rates = None
        if self._learned:
            v_rates = {n: (t * self._moment[n]).sum(0).mul_(-self._lr) for n, t in v.items()}
        rates = self._rates
        of_moment = v if rates is None else {n: rates[n] * tensor for n, tensor in v.items()}
        if v_state:
            of_moment = {n: tensor + v_state[n] for n, tensor in of_moment.items()}
        before = {n: self._beta * tensor for n, tensor in of_moment.items()} if self._beta else ()
        return PulledBack(v, of_moment, -self._lr, before, v_rates)


class Moment(NamedTuple):
    """A moment of the gradients seen, of which older ones count β times as much as newer ones.

    Attributes:
        total: ``{name: […]}``; zero before the first gradient.
        weight: What the gradients in it count together: 1 − βᵗ after t of them; a number, or a
            tensor ``[]`` where the moment is another's, who has averaged it.
        kept: How much is left of the total that it began with: βᵗ after t gradients.
    """

    total: Params
    weight: float | Tensor = 0.0
    kept: float = 1.0

    def counted(self, beta: float) -> "Moment":
        """Return the weights of the moment with one more gradient, and a total to be filled."""
        return Moment({}, beta * self.weight + (1 - beta), beta * self.kept)


class AdamState(NamedTuple):
    """What Adam remembers: the first and the second moment of the gradients."""

    first: Moment
    second: Moment


class AdamRule:
    """Adam (arXiv:1412.6980, algorithm 1); with ``decay`` AdamW (arXiv:1711.05101, algorithm 2).

    Its derivative stays finite where a gradient is exactly zero, as that of a ReLU which is off for
    all of a support set: √0 has an infinite slope. The step of such an element stays below 1e-8.
    What a step computes is computed again on the way back.
    """

    beta2, eps = 0.999, 1e-8

    def __init__(
        self, weights: Params, gradients: Params, state: AdamState | None, rates: Params | None, *,
        lr: float, beta1: float = 0.9, decay: float = 0.0, second: Moment | None = None,
        learned: bool = False,
    ) -> None:  # fmt: skip
        self._lr, self._beta1, self._decay = lr, beta1, decay
        self._before, self._gradients, self._rates = weights, gradients, rates
        self._learned = learned
        if state is None:
            nothing = Moment({name: torch.zeros_like(g) for name, g in gradients.items()})
            state = AdamState(nothing, second or nothing)
        self._state = state
        self._counted = state.first.counted(beta1), state.second.counted(self.beta2)

    @functools.cached_property
    def _taken(self) -> tuple[Params, AdamState]:
        weights, state = {}, AdamState(*self._counted)
        # Name by name: what is computed on the way is of one tensor alone.
        for name, before in self._before.items():
            m, v, mean, root = self._seen(name, self._gradients[name])
            state.first.total[name], state.second.total[name] = m, v
            update = self._update(name, mean, root)
            weights[name] = before + (update if self._rates is None else self._rates[name] * update)
        return weights, state

    @property
    def weights(self) -> Params:
        """The weights after it."""
        return self._taken[0]

    @property
    def state(self) -> AdamState:
        """The state after it."""
        return self._taken[1]

    def _update(self, name: str, mean: Tensor, root: Tensor) -> Tensor:
        update = -self._lr * mean / (root + self.eps)
        return update - self._lr * self._decay * self._before[name] if self._decay else update

    def _seen(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return both totals with a gradient, the first's mean and the root of the second's."""
        beta1, beta2, (first, second) = self._beta1, self.beta2, self._counted
        g = torch.where(gradient == 0, NOT_ZERO, gradient)
        m = g
        if beta1:
            m = torch.add(g * (1 - beta1), self._state.first.total[name], alpha=beta1)
        v = torch.add(g.square() * (1 - beta2), self._state.second.total[name], alpha=beta2)
        return m, v, m / first.weight if beta1 else g, (v / second.weight).sqrt()

    def pull_back(self, v: Params, v_state: Any) -> PulledBack:
        """Pull cotangents of weights and state (None: zero) back to before the rule."""
        by = self._lr * self._decay
        of_weights, of_gradients, of_state, of_rates = {}, {}, {}, {}
        for name in tuple(self._gradients):
            g, of_weight = self._gradients.pop(name), v.pop(name)  # there are many, and large
            along = of_weight if self._rates is None else self._rates[name] * of_weight
            of_weights[name] = torch.add(of_weight, along, alpha=-by) if by else of_weight
            _, _, mean, root = self._seen(name, g)
            if self._learned:
                of_rates[name] = (of_weight * self._update(name, mean, root)).sum(0)
            after = v_state and v_state.pop(name)
            of_gradients[name], of_state[name] = self._back(g, mean, root, along, after)
        rates = of_rates if self._learned else None
        return PulledBack(of_weights, of_gradients, 1.0, of_state, rates)

    def _back(
        self, gradient: Tensor, mean: Tensor, root: Tensor, along: Tensor,
        of_state: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Pull ``along``, a step's cotangent, and its totals' back to its gradient and totals."""
        below, (first, second) = root + self.eps, self._counted
        of_m = (along / below).mul_(-self._lr)
        of_v = (of_m * mean).div_(below).div_(root).mul_(-0.5 / second.weight)
        of_m.div_(first.weight)
        if of_state is not None:
            of_m.add_(of_state[0])
            of_v.add_(of_state[1])
        of_gradient = (of_v * gradient).mul_(2 * (1 - self.beta2))
        of_gradient.add_(of_m, alpha=1 - self._beta1)
        # What stands for zero is a constant.
        of_gradient.masked_fill_(gradient == 0, 0.0)
        return of_gradient, (of_m.mul_(self._beta1), of_v.mul_(self.beta2))


Rule: TypeAlias = SGDRule | AdamRule
MakeRule: TypeAlias = Callable[[Params, Params, Any, Params | None], Rule]
"""Weights, gradients, state (None before the first step) and rates, if any, to a `Rule`."""

OPTIMIZERS: dict[str, Callable[..., Rule]] = {
    "sgd": SGDRule,
    "momentum": functools.partial(SGDRule, beta=0.9),
    "adam": AdamRule,
    "adamw": functools.partial(AdamRule, decay=0.01),
    "adam0": functools.partial(AdamRule, beta1=0.0),
}
"""By the names of ``--inner-optimizer``."""


def make_rule(
    name: str, lr: float, second: Moment | None = None, *, learned: bool = False
) -> MakeRule:
    """Return the rule of an optimizer, whose updates are multiplied by any rates.

    ``second``: what Adam's second moment begins as; ``learned``: whether `PulledBack.rates` will be
    asked for.
    """
    values = {} if second is None else {"second": second}
    return functools.partial(OPTIMIZERS[name], lr=lr, learned=learned, **values)
