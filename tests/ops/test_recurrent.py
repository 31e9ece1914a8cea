"""Recurrent layers against torch's own, in float64: values and two derivatives, and over tasks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from maml.ops.instead import instead

CASES: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm, deep, both ways": (nn.LSTM, {"num_layers": 3, "bidirectional": True, "bias": False}),
    "gru": (nn.GRU, {"batch_first": True}),
    "gru, deep, both ways": (nn.GRU, {"num_layers": 2, "bidirectional": True, "bias": False}),
    "rnn": (nn.RNN, {"num_layers": 2}),
    "rnn, relu, both ways": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    "projected": (nn.LSTM, {"proj_size": 2}),
}
LENGTHS = [5, 3, 3, 1]


def layer_of(case: str) -> nn.RNNBase:
    torch.manual_seed(0)
    kind, options = CASES[case]
    return kind(3, 4, dtype=torch.float64, **options)


def results(layer: nn.RNNBase, x: Any, inputs: list[Tensor]) -> list[Tensor]:
    y, states = layer(x)
    outputs = [y if isinstance(y, Tensor) else y.data]
    outputs += states if isinstance(states, tuple) else [states]
    first = torch.autograd.grad(
        sum((t.sin() * t).sum() for t in outputs), inputs, create_graph=True
    )
    second = torch.autograd.grad(sum((t.sin() * t).sum() for t in first), inputs)
    return [*outputs, *first, *second]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_value_and_two_derivatives_equal_torchs(case: str, packed: bool) -> None:
    layer = layer_of(case)
    x = torch.randn(4, 5, 3, dtype=torch.float64, requires_grad=True)
    first = bool(layer.batch_first)
    inputs = [x, *layer.parameters()]

    def given() -> Any:
        own = x if first else x.transpose(0, 1)
        return pack_padded_sequence(own, LENGTHS, batch_first=first) if packed else own

    expected = results(layer, given(), inputs)
    with instead():
        found = results(layer, given(), inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ["lstm, deep, both ways", "gru, deep, both ways", "rnn"])
def test_batched_over_tasks_with_weights_of_their_own(case: str) -> None:
    layer = layer_of(case)
    params = dict(layer.named_parameters())
    tasks = torch.randn(3, 5, 2, 3, dtype=torch.float64)

    def outer(x: Tensor) -> Tensor:
        def inner(at: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(layer, at, (x,))[0].square().mean()

        found = torch.func.grad(inner)(params)
        return inner({name: p - 0.5 * found[name] for name, p in params.items()})

    def gradients(losses: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(losses.sum(), list(params.values()))

    alone = gradients(torch.stack([outer(x) for x in tasks]))
    with instead():
        together = gradients(torch.func.vmap(outer)(tasks))
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
