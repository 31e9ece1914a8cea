"""The optimizers of the inner loop: one step of each, and its way back.

A rule maps weights θ, gradients g and its state to the weights and the state ``after`` the step,
element by element. `maml.metagradient.forward_over_reverse` needs the product of a cotangent with
the rule's Jacobian, and only once. So ``pull_back`` uses up its arguments and the rule itself.
`maml.metagradient.unrolled` differentiates through the rule.

Adam is written out here, because TorchOpt (0.7.3) computes the bias corrections 1 − βᵗ in float32
for any dtype of the parameters. In float64 this changes the meta-gradient of three inner steps by
1e-6 to 1e-3 of itself. Here a correction is a Python number, or a tensor for a given moment.
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

    With ``scale``, a rule that only scales need not touch every element. The cotangents of rates
    are summed over tasks.
    """

    weights: Params
    gradients: Params
    scale: float
    state: Any
    rates: Params | None = None


class SGDRule:
    """m' = β m + g, θ' = θ − α r ∘ m', in closed form; without momentum β is 0, and no m is kept.

    The rates r may have one value per element; an element with rate zero does not move. Cotangents
    of the state are in units of −α.
    """

    def __init__(
        self, weights: Params, gradients: Params, state: Any, rates: Params | None, *,
        lr: float, beta: float = 0.0,
    ) -> None:  # fmt: skip
        self._lr, self._beta, self._rates = lr, beta, rates
        moment = gradients
        if state:
            moment = {n: torch.add(g, state[n], alpha=beta) for n, g in gradients.items()}
        self._moment = {} if rates is None else moment
        moved = {
            name: torch.add(tensor, moment[name], alpha=-lr)
            if rates is None
            else torch.addcmul(tensor, rates[name], moment[name], value=-lr)
            for name, tensor in weights.items()
        }
        self.after: tuple[Params, Any] = moved, moment if beta else ()

    def pull_back(self, v: Params, v_state: Any) -> PulledBack:
        """Pull cotangents of weights and state (None: zero) back to before the rule."""
        of_moment, v_rates, rates = v, None, self._rates
        if rates is not None:
            of_moment = {n: rates[n] * tensor for n, tensor in v.items()}
            v_rates = {n: (t * self._moment[n]).sum(0).mul_(-self._lr) for n, t in v.items()}
        if v_state:
            of_moment = {n: tensor + v_state[n] for n, tensor in of_moment.items()}
        before = {n: self._beta * tensor for n, tensor in of_moment.items()} if self._beta else ()
        return PulledBack(v, of_moment, -self._lr, before, v_rates)


class Moment(NamedTuple):
    """A weighted sum of past gradients: each new gradient multiplies the older ones by β.

    Attributes:
        total: ``{name: […]}``; zero before the first gradient.
        weight: The sum of the gradients' weights: 1 − βᵗ after t gradients. A number, or a tensor
            ``[]`` for a given moment that is a mean over tasks.
    """

    total: Params
    weight: float | Tensor = 0.0

    def counted(self, beta: float) -> "Moment":
        """Return the moment after one more gradient: its weights, and an empty total to fill."""
        return Moment({}, beta * self.weight + (1 - beta))


class AdamState(NamedTuple):
    """Adam's state: the first and the second moment of the gradients."""

    first: Moment
    second: Moment


class AdamRule:
    """Adam (arXiv:1412.6980, algorithm 1); with ``decay`` AdamW (arXiv:1711.05101, algorithm 2).

    A gradient can be exactly zero, for example if a ReLU is off for the whole support set. There √0
    has an infinite slope, but the derivative here stays finite. Such an element moves by less than
    1e-8. The way back computes a step's intermediate tensors again.
    """

    beta2, eps = 0.999, 1e-8

    def __init__(
        self, weights: Params, gradients: Params, state: AdamState | None, rates: Params | None, *,
        lr: float, beta1: float = 0.9, decay: float = 0.0, second: Moment | None = None,
    ) -> None:  # fmt: skip
        self._lr, self._beta1, self._decay = lr, beta1, decay
        self._before, self._gradients, self._rates = weights, gradients, rates
        if state is None:
            nothing = Moment({name: torch.zeros_like(g) for name, g in gradients.items()})
            state = AdamState(nothing, second or nothing)
        self._state = state
        self._counted = state.first.counted(beta1), state.second.counted(self.beta2)

    @functools.cached_property
    def after(self) -> tuple[Params, AdamState]:
        """The weights and the state after the step."""
        weights, state = {}, AdamState(*self._counted)
        # Name by name, so that only one tensor's intermediate results exist at a time.
        for name, before in self._before.items():
            m, v, mean, root = self._seen(name, self._gradients[name])
            state.first.total[name], state.second.total[name] = m, v
            update = self._update(name, mean, root)
            weights[name] = before + (update if self._rates is None else self._rates[name] * update)
        return weights, state

    def _update(self, name: str, mean: Tensor, root: Tensor) -> Tensor:
        update = -self._lr * mean / (root + self.eps)
        return update - self._lr * self._decay * self._before[name] if self._decay else update

    def _seen(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return both totals after a gradient, the first mean, and the root of the second mean."""
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
            g, of_weight = self._gradients.pop(name), v.pop(name)  # free large tensors early
            along = of_weight if self._rates is None else self._rates[name] * of_weight
            of_weights[name] = torch.add(of_weight, along, alpha=-by) if by else of_weight
            _, _, mean, root = self._seen(name, g)
            if self._rates is not None:
                of_rates[name] = (of_weight * self._update(name, mean, root)).sum(0)
            after = v_state and v_state.pop(name)
            of_gradients[name], of_state[name] = self._back(g, mean, root, along, after)
        rates = None if self._rates is None else of_rates
        return PulledBack(of_weights, of_gradients, 1.0, of_state, rates)

    def _back(
        self, gradient: Tensor, mean: Tensor, root: Tensor, along: Tensor,
        of_state: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Pull cotangents of a step (``along``) and of both totals back to gradient and totals."""
        below, (first, second) = root + self.eps, self._counted
        of_m = (along / below).mul_(-self._lr)
        of_v = (of_m * mean).div_(below).div_(root).mul_(-0.5 / second.weight)
        of_m.div_(first.weight)
        if of_state is not None:
            of_m.add_(of_state[0])
            of_v.add_(of_state[1])
        of_gradient = (of_v * gradient).mul_(2 * (1 - self.beta2))
        of_gradient.add_(of_m, alpha=1 - self._beta1)
        # `NOT_ZERO`, which replaced these gradients, is a constant.
        of_gradient.masked_fill_(gradient == 0, 0.0)
        return of_gradient, (of_m.mul_(self._beta1), of_v.mul_(self.beta2))


Rule: TypeAlias = SGDRule | AdamRule
MakeRule: TypeAlias = Callable[[Params, Params, Any, Params | None], Rule]
"""Makes a `Rule` from weights, gradients, state (None before the first step), and any rates."""

OPTIMIZERS: dict[str, Callable[..., Rule]] = {
    "sgd": SGDRule,
    "momentum": functools.partial(SGDRule, beta=0.9),
    "adam": AdamRule,
    "adamw": functools.partial(AdamRule, decay=0.01),
    "adam0": functools.partial(AdamRule, beta1=0.0),
}
"""By the names of ``--inner-optimizer``."""


def make_rule(name: str, lr: float, second: Moment | None = None) -> MakeRule:
    """Return the rule of an optimizer; ``second``: the initial value of Adam's second moment."""
    values = {} if second is None else {"second": second}
    return functools.partial(OPTIMIZERS[name], lr=lr, **values)
