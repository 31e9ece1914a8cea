"""Torch's recurrent layers, all layers and directions, by `Lstm` and `Gru`.

Torch computes them by oneDNN, which cannot be batched over tasks, or by cuDNN, which has no second
derivative. The functions here have the arguments of ``torch.lstm``, ``torch.gru``,
``torch.rnn_tanh`` and ``torch.rnn_relu``, which torch's modules call.

Shape legend: T steps, E sequences, I inputs, N rows of all steps, H units, K layers × directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maml.ops.gru import Gru
from maml.ops.lstm import Lstm
from maml.ops.steps import Found, Steps


class _Weights(NamedTuple):
    """The weights of one layer in one direction; biases are None if the layer has none."""

    inputs: Tensor
    states: Tensor
    input_bias: Tensor | None = None
    state_bias: Tensor | None = None


Layer = Callable[[Tensor, list[Tensor], _Weights, Steps], tuple[Tensor, ...]]
"""``(rows [N, I], states [E, H], weights, steps)`` → rows ``[N, H]``, and the states at the end."""


def _lstm(rows: Tensor, states: list[Tensor], weights: _Weights, steps: Steps) -> tuple[Any, ...]:
    bias = None
    if weights.input_bias is not None and weights.state_bias is not None:
        bias = weights.input_bias + weights.state_bias
    return Lstm(steps)(F.linear(rows, weights.inputs, bias), *states, weights.states)


def _gru(rows: Tensor, states: list[Tensor], weights: _Weights, steps: Steps) -> tuple[Any, ...]:
    bias = weights.state_bias
    if bias is None:
        bias = weights.states.new_zeros(len(weights.states))
    given = F.linear(rows, weights.inputs, weights.input_bias)
    return Gru(steps)(given, *states, weights.states, bias[None])


def _rnn(of: Callable[[Tensor], Tensor]) -> Layer:
    def layer(
        rows: Tensor, states: list[Tensor], weights: _Weights, steps: Steps
    ) -> tuple[Any, ...]:
        given = F.linear(rows, weights.inputs, weights.input_bias)[None]
        fixed = {"w": weights.states.mT[None]}
        if weights.state_bias is not None:
            given = given + weights.state_bias

        def step(states: list[Tensor], of_step: dict[str, Tensor]) -> Found:
            now = of(torch.baddbmm(of_step["a"], states[0], of_step["w"]))
            return (now,), (now,)

        (h,), (found,) = steps.take(step, [states[0][None]], {"a": given}, fixed)
        return found[0], h[0]

    return layer


def _stacked(layer: Layer, n_states: int, of_torch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with torch's arguments: of padded sequences, or of packed ones."""

    def call(*given: Any) -> Any:
        packed = isinstance(given[-1], bool) and not isinstance(given[3], bool)
        data = given[0]
        states, weights, biased, n_layers, dropout, trains, both_ways, *first = given[1 + packed :]
        states = [states] if isinstance(states, Tensor) else list(states)
        per = 4 if biased else 2
        if len(weights) != per * n_layers * (1 + both_ways):  # a projection has a further weight
            return of_torch(*given)
        own = [_Weights(*weights[i : i + per]) for i in range(0, len(weights), per)]
        rows, batch_first = data, bool(first and first[0])
        if packed:
            lengths = tuple(given[1].tolist())
        else:
            rows = rows.transpose(0, 1) if batch_first else rows
            lengths = (rows.shape[1],) * rows.shape[0]
            rows = rows.flatten(0, 1)
        rows, ends = _all_layers(layer, rows, states, own, lengths, both_ways, dropout * trains)
        if not packed:
            rows = rows.unflatten(0, (len(lengths), -1))
            rows = rows.transpose(0, 1) if batch_first else rows
        return (rows, *ends[:n_states])

    return call


def _all_layers(
    layer: Layer,
    rows: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[_Weights],
    sizes: tuple[int, ...],
    both_ways: bool,
    dropout: float,
) -> tuple[Tensor, list[Tensor]]:
    """Return rows ``[N, H]`` (twice as many units ``both_ways``) and states ``[K, E, H]``."""
    ends: list[tuple[Tensor, ...]] = []
    for k in range(0, len(weights), 1 + both_ways):
        if k and dropout:
            rows = F.dropout(rows, dropout)
        found = []
        for way in range(1 + both_ways):
            own = [state[k + way] for state in states]
            of_rows, *end = layer(rows, own, weights[k + way], Steps(sizes, bool(way)))
            found.append(of_rows)
            ends.append(tuple(end))
        rows = torch.cat(found, -1) if both_ways else found[0]
    return rows, [torch.stack(of_state) for of_state in zip(*ends, strict=True)]


lstm = _stacked(_lstm, 2, torch.lstm)
gru = _stacked(_gru, 1, torch.gru)
rnn_tanh = _stacked(_rnn(torch.tanh), 1, torch.rnn_tanh)
rnn_relu = _stacked(_rnn(torch.relu), 1, torch.rnn_relu)
