"""One step of an inner optimizer, and its way back.

A rule takes weights θ, gradients g and its state to new ones, element by element. What
`maml.metagradient.forward_over_reverse` asks of it is the product of a cotangent with its Jacobian.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torchopt
from torch import Tensor
from torch.utils import _pytree as pytree

from maml.metagradient.adam import Adam, AdamState, Moment
from maml.metagradient.optimizers import ADAMS, OPTIMIZERS, Optimizer, begun
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
    """θ' = θ − α g, in closed form."""

    state: Any = ()

    def __init__(self, lr: float, weights: Params, gradients: Params) -> None:
        self._lr = lr
        self.weights = {
            name: torch.add(tensor, gradients[name], alpha=-lr) for name, tensor in weights.items()
        }

    def pull_back(self, v: Params, v_state: Any) -> PulledBack:
        """See `Rule.pull_back`."""
        return PulledBack(v, v, -self._lr, ())


class RatedSGDRule:
    """θ' = θ − α r ∘ g, with a rate for each element: one that is zero stands still."""

    state: Any = ()

    def __init__(
        self, lr: float, weights: Params, gradients: Params, rates: Params, *, learned: bool
    ) -> None:
        self._lr, self._rates = lr, rates
        self._gradients = gradients if learned else None
        self.weights = {
            name: torch.addcmul(tensor, rates[name], gradients[name], value=-lr)
            for name, tensor in weights.items()
        }

    def pull_back(self, v: Params, v_state: Any) -> PulledBack:
        """See `Rule.pull_back`."""
        v_rates = None
        if self._gradients is not None:
            v_rates = {
                name: (tensor * self._gradients[name]).sum(0).mul_(-self._lr)
                for name, tensor in v.items()
            }
        v_gradients = {name: self._rates[name] * tensor for name, tensor in v.items()}
        return PulledBack(v, v_gradients, -self._lr, (), v_rates)


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


class AutogradRule:
    """Any of TorchOpt's functional optimizers, by autograd; its updates times rates, if any."""

    def __init__(
        self,
        optimizer: Optimizer,
        weights: Params,
        gradients: Params,
        state: Any,
        rates: Params | None,
        *,
        learned: bool,
        differentiated: bool = True,
    ) -> None:
        with torch.set_grad_enabled(differentiated):
            self._rates = _leaves(rates) if rates is not None and learned else None
            rates = self._rates or rates
            self._before_weights, self._gradients = _leaves(weights), _leaves(gradients)
            before, structure = pytree.tree_flatten(state)
            before = [_leaf(leaf) for leaf in before]
            self._before = [leaf for leaf in before if _is_differentiable(leaf)]
            updates, new_state = optimizer.update(
                self._gradients,
                pytree.tree_unflatten(before, structure),
                params=self._before_weights,
                inplace=False,
            )
            if rates is not None:
                updates = {name: rates[name] * update for name, update in updates.items()}
            self._after = torchopt.apply_updates(self._before_weights, updates, inplace=False)
        after, structure = pytree.tree_flatten(new_state)
        self._state_after = [leaf for leaf in after if _is_differentiable(leaf)]
        detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in after]
        self.weights = {name: tensor.detach() for name, tensor in self._after.items()}
        self.state = pytree.tree_unflatten(detached, structure)

    def pull_back(self, v: Params, v_state: Any) -> PulledBack:
        """See `Rule.pull_back`."""
        if v_state is None:
            v_state = [torch.zeros_like(leaf) for leaf in self._state_after]
        # A new state tensor that no gradient reached has no graph: a constant.
        reached = [
            (leaf, cotangent)
            for leaf, cotangent in zip(self._state_after, v_state, strict=True)
            if leaf.requires_grad
        ]
        names = tuple(self._before_weights)
        outputs = [*(self._after[name] for name in names), *(leaf for leaf, _ in reached)]
        cotangents = [*(v[name] for name in names), *(cotangent for _, cotangent in reached)]
        inputs = [self._before_weights[name] for name in names]
        inputs += [*(self._gradients[name] for name in names), *self._before]
        end = len(inputs)
        if self._rates is not None:
            inputs += [self._rates[name] for name in names]
        pulled = torch.autograd.grad(
            outputs, inputs, cotangents, allow_unused=True, materialize_grads=True
        )
        n = len(names)
        return PulledBack(
            dict(zip(names, pulled[:n], strict=True)),
            dict(zip(names, pulled[n : 2 * n], strict=True)),
            1.0,
            list(pulled[2 * n : end]),
            None if self._rates is None else dict(zip(names, pulled[end:], strict=True)),
        )


MakeRule: TypeAlias = Callable[[Params, Params, Any, Params | None], Rule]
"""Weights, gradients, state (None before the first step) and rates, if any, to a `Rule`."""


def make_rule(
    name: str,
    lr: float,
    *,
    learned_rates: bool = False,
    differentiated: bool = True,
    second: Moment | None = None,
) -> MakeRule:
    """Return the rule of ``--inner-optimizer name``, whose updates are multiplied by any rates.

    Args:
        name: The optimizer.
        lr: Its learning rate.
        learned_rates: Whether `PulledBack.rates` will be asked for.
        differentiated: Whether `Rule.pull_back` will.
        second: What Adam's second moment begins as; None: as nothing seen.
    """
    optimizer = OPTIMIZERS[name](lr)

    def sgd(weights: Params, gradients: Params, state: Any, rates: Params | None) -> Rule:
        if rates is None:
            return SGDRule(lr, weights, gradients)
        return RatedSGDRule(lr, weights, gradients, rates, learned=learned_rates)

    def other(weights: Params, gradients: Params, state: Any, rates: Params | None) -> Rule:
        state = begun(optimizer, gradients, second) if state is None else state
        return AutogradRule(
            optimizer, weights, gradients, state, rates,
            learned=learned_rates, differentiated=differentiated,
        )  # fmt: skip

    def of_adam(weights: Params, gradients: Params, state: Any, rates: Params | None) -> Rule:
        state = begun(optimizer, gradients, second) if state is None else state
        return AdamRule(ADAMS[name](lr), weights, gradients, state, rates, learned=learned_rates)

    return sgd if name == "sgd" else of_adam if name in ADAMS else other


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _leaf(leaf: Any) -> Any:
    return leaf.detach().requires_grad_() if _is_differentiable(leaf) else leaf


def _leaves(params: Params) -> Params:
    return {name: _leaf(tensor) for name, tensor in params.items()}
