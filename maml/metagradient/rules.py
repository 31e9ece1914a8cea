"""One step of an inner optimizer, and its way back.

A rule takes weights θ, gradients g and its state to new ones, element by element. What
`maml.metagradient.forward_over_reverse` asks of it is the product of a cotangent with its Jacobian.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from maml.metagradient.adam import Adam, AdamState, Moment
from maml.metagradient.optimizers import ADAMS, MOMENTUM, begun
from maml.params import Params


class PulledBack(NamedTuple):
    """Cotangents before a rule: of the weights, of the gradients (times ``scale``), of the state.

    ``scale`` is apart so that a rule which only scales need not touch every element for it.
    ``rates`` is that of the rates, summed over tasks, where they are learned.
    """

    weights: Params
    gradients: Params
    scale: float
    state: Any
    rates: Params | None = None


class Rule(Protocol):
    """A rule applied at given weights, gradients and state.

    Attributes:
        weights: The weights after it.
        state: The state after it.
    """

    @property
    def weights(self) -> Params: ...  # noqa: D102

    @property
    def state(self) -> Any: ...  # noqa: D102

    def pull_back(self, v: Params, v_state: Any) -> PulledBack:
        """Pull cotangents of the weights and the state (None: zero) back to before the rule.

        Once: what it is given, and what the rule was, may be used up.
        """


class SGDRule:
    """m' = β m + g, θ' = θ − α r ∘ m', in closed form; without momentum β is 0, and no m is kept.

    The rates r may be one for each element: one that is zero stands still. Cotangents of the state
    are in units of −α.
    """

    def __init__(
        self, lr: float, beta: float, weights: Params, gradients: Params, state: Any,
        rates: Params | None, *, learned: bool,
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
        """See `Rule.pull_back`."""
        v_rates = None
        if self._learned:
            v_rates = {n: (t * self._moment[n]).sum(0).mul_(-self._lr) for n, t in v.items()}
        rates = self._rates
        of_moment = v if rates is None else {n: rates[n] * tensor for n, tensor in v.items()}
        if v_state:
            of_moment = {n: tensor + v_state[n] for n, tensor in of_moment.items()}
        before = {n: self._beta * tensor for n, tensor in of_moment.items()} if self._beta else ()
        return PulledBack(v, of_moment, -self._lr, before, v_rates)


class AdamRule:
    """Adam and AdamW in closed form: what a step computes is computed again on the way back."""

    def __init__(
        self, adam: Adam, weights: Params, gradients: Params, state: AdamState,
        rates: Params | None, *, learned: bool,
    ) -> None:  # fmt: skip
        self._adam, self._before, self._gradients, self._state = adam, weights, gradients, state
        self._rates, self._learned = rates, learned

    @functools.cached_property
    def _after(self) -> tuple[Params, AdamState]:
        updates, state = self._adam.update(self._gradients, self._state, params=self._before)
        if self._rates is not None:
            updates = {name: self._rates[name] * update for name, update in updates.items()}
        return {name: w + updates.pop(name) for name, w in self._before.items()}, state

    @property
    def weights(self) -> Params:
        """See `Rule`."""
        return self._after[0]

    @property
    def state(self) -> AdamState:
        """See `Rule`."""
        return self._after[1]

    def pull_back(self, v: Params, v_state: Any) -> PulledBack:
        """See `Rule.pull_back`."""
        adam, rates = self._adam, self._rates
        by = adam.lr * adam.weight_decay
        of_weights, of_gradients, of_state, of_rates = {}, {}, {}, {}
        for name in tuple(self._gradients):
            g, of_weight = self._gradients.pop(name), v.pop(name)  # there are many, and large
            along = of_weight if rates is None else rates[name] * of_weight
            of_weights[name] = torch.add(of_weight, along, alpha=-by) if by else of_weight
            if self._learned:
                moved = {name: self._before[name]}
                update = adam.update({name: g}, self._state, params=moved)[0][name]
                of_rates[name] = (of_weight * update).sum(0)
            of_gradients[name], of_state[name] = adam.pull_back(
                name, g, self._state, along, v_state and v_state.pop(name)
            )
        return PulledBack(
            of_weights, of_gradients, 1.0, of_state, of_rates if self._learned else None
        )


MakeRule: TypeAlias = Callable[[Params, Params, Any, Params | None], Rule]
"""Weights, gradients, state (None before the first step) and rates, if any, to a `Rule`."""


def make_rule(
    name: str, lr: float, *, learned_rates: bool = False, second: Moment | None = None
) -> MakeRule:
    """Return the rule of ``--inner-optimizer name``, whose updates are multiplied by any rates.

    Args:
        name: The optimizer.
        lr: Its learning rate.
        learned_rates: Whether `PulledBack.rates` will be asked for.
        second: What Adam's second moment begins as; None: as nothing seen.
    """
    if name not in ADAMS:
        beta = {"sgd": 0.0, "momentum": MOMENTUM}[name]
        return functools.partial(SGDRule, lr, beta, learned=learned_rates)
    adam = ADAMS[name](lr)

    def of_adam(weights: Params, gradients: Params, state: Any, rates: Params | None) -> Rule:
        state = begun(adam, gradients, second) if state is None else state
        return AdamRule(adam, weights, gradients, state, rates, learned=learned_rates)

    return of_adam
