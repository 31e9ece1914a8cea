"""Recurrent layers against torch's own, in float64: values and two derivatives."""

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
    "dropout": (nn.LSTM, {"num_layers": 3, "dropout": 0.4, "bidirectional": True}),
    "gru, dropout": (nn.GRU, {"num_layers": 2, "dropout": 0.4}),
    "projected": (nn.LSTM, {"proj_size": 2}),
}
LENGTHS = [5, 3, 3, 1]


def layer_of(case: str) -> nn.RNNBase:
    torch.manual_seed(0)
    kind, options = CASES[case]
    return kind(3, 4, dtype=torch.float64, **options)


def results(layer: nn.RNNBase, x: Any, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)  # dropout draws the same
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
