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
        weights, (first, second) = {}, self._counted
        # Name by name, so that only one tensor's intermediate results exist at a time.
        for name, gradient in self._gradients.items():
            weights[name], first.total[name], second.total[name] = self._step(
                *self._inputs(name, gradient)
            )
        return weights, AdamState(first, second)

    def _inputs(self, name: str, gradient: Tensor) -> list[Tensor]:
        """Return what a tensor's step depends on; any rate is the last."""
        totals = [moment.total[name] for moment in self._state]
        rate = [] if self._rates is None else [self._rates[name]]
        return [self._before[name], gradient, *totals, *rate]

    def _step(
        self, weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, rate: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a tensor's weight and both totals after a step."""
        first, second = self._counted
        g = torch.where(gradient == 0, NOT_ZERO, gradient)
        m = torch.add(g * (1 - self._beta1), m, alpha=self._beta1) if self._beta1 else g
        v = torch.add(g.square() * (1 - self.beta2), v, alpha=self.beta2)
        update = -self._lr * (m / first.weight) / ((v / second.weight).sqrt() + self.eps)
        if self._decay:
            update = update - self._lr * self._decay * weight
        return weight + (update if rate is None else rate * update), m, v

    def pull_back(self, v: Params, v_state: Any) -> PulledBack:
        """Pull cotangents of weights and state (None: zero) back to before the rule."""
        found = PulledBack({}, {}, 1.0, {}, None if self._rates is None else {})
        for name in tuple(self._gradients):
            # Large tensors are freed early.
            cotangents = v.pop(name), *(v_state.pop(name) if v_state else ())
            inputs = [t.detach() for t in self._inputs(name, self._gradients.pop(name))]
            with torch.enable_grad():
                outputs = self._step(*(tensor.requires_grad_() for tensor in inputs))
            of_weight, of_gradient, of_m, of_v, *of_rate = torch.autograd.grad(
                outputs[: len(cotangents)], inputs, cotangents, materialize_grads=True
            )
            found.weights[name], found.gradients[name] = of_weight, of_gradient
            found.state[name] = of_m, of_v
            if found.rates is not None:
                (found.rates[name],) = of_rate
        return found


Rule: TypeAlias = SGDRule | AdamRule
MakeRule: TypeAlias = Callable[[Params, Params, Any, Params | None], Rule]
"""Makes a `Rule` from weights, gradients, state (None before the first step), and any rates."""

OPTIMIZERS: dict[str, Callable[..., Rule]] = {
    "sgd": SGDRule,
    "momentum": SGDRule,
    "adam": AdamRule,
    "adamw": functools.partial(AdamRule, decay=0.01),
    "adam0": functools.partial(AdamRule, beta1=0.0),
}
"""By the names of ``--inner-optimizer``."""


def make_rule(name: str, lr: float, momentum: float, second: Moment | None = None) -> MakeRule:
    """Return the rule of an optimizer; ``second``: the initial value of Adam's second moment."""
    values: dict[str, Any] = {} if second is None else {"second": second}
    if name == "momentum":
        values["beta"] = momentum
    return functools.partial(OPTIMIZERS[name], lr=lr, **values)
