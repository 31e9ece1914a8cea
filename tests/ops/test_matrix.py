"""Every operation in every way that a user may choose, against a plain loop in float64."""

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations as made_by
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import maml
from maml.config.fields import with_values
from maml.library import compiling
from maml.networks.calls import apply
from maml.networks.ordinary import explicit
from maml.ops import attention_by_blocks
from maml.ops.instead import instead
from maml.params import Params
from tests.library.own_networks import by_loop, made, stacked

STEPS, LR = 2, 0.1


class Then(nn.Module):
    """A layer of rows ``[E, 4, 4]``, a product of its own, and an output layer."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call, self.body = layer, call, nn.Linear(4, 4)
        with torch.no_grad():
            example = call(layer, torch.zeros(2, 4, 4))
        self.head = nn.Linear(example[0].numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.layer, self.body(x).tanh()).flatten(1))


def rows(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]


def packed(layer: nn.Module, x: Tensor) -> Tensor:
    lengths = torch.tensor([1, 4, 2, 3, 4, 2, 3, 1])[: len(x)]
    sequences = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(layer(sequences)[0], True, 0.5, 4)[0]


def words(layer: nn.Module, x: Tensor) -> Tensor:
    signs = (x > 0).long()
    return layer(2 * signs[..., 0] + signs[..., 1]) * x[..., :1]


def again(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


DEEP = {"num_layers": 3, "bidirectional": True, "batch_first": True}
OPERATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True),
                  lambda layer, x: layer(x, x, x, need_weights=False)[0]),
    "lstm": (lambda: nn.LSTM(4, 3, batch_first=True), rows),
    "gru": (lambda: nn.GRU(4, 3, batch_first=True), rows),
    "rnn": (lambda: nn.RNN(4, 3, batch_first=True), rows),
    "lstm, packed": (lambda: nn.LSTM(4, 3, **DEEP), packed),
    "gru, packed": (lambda: nn.GRU(4, 3, **DEEP), packed),
    "rnn, packed": (lambda: nn.RNN(4, 3, **DEEP), packed),
    "convolution": (lambda: nn.Conv1d(4, 4, 3, groups=2), nn.Module.__call__),
    "layer norm": (lambda: nn.LayerNorm(4), nn.Module.__call__),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), nn.Module.__call__),
    "embedding": (lambda: nn.Embedding(4, 4, padding_idx=1), words),
    "weight norm": (lambda: made_by.weight_norm(nn.Linear(4, 3)), nn.Module.__call__),
    "spectral norm": (lambda: made_by.spectral_norm(nn.Linear(4, 3)), nn.Module.__call__),
    "checkpoint": (lambda: nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True), again),
}  # fmt: skip
WAYS = [(how, way) for how in ("vmap", "tasks") for way in ("reverse", "mixed")]
WAYS += [("compiled", "auto")]
NOT_COMPILED = "lstm, packed", "gru, packed", "rnn, packed", "checkpoint"
"""Their forward reads lengths as numbers; torch cannot batch a checkpoint."""
LEFT_OUT = "embedding", "spectral norm"
"""By definition, their derivative leaves out a row for padding, and how u and v depend on W."""


@pytest.fixture(autouse=True)
def _small_blocks_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BLOCK": 60, "LEAST_ROWS": 2, "SHORT": 0}.items():
        monkeypatch.setattr(attention_by_blocks, name, value)
    monkeypatch.setattr(compiling, "inductor", lambda run, inputs: run)


def network_of(name: str) -> Then:
    torch.manual_seed(0)
    make, call = OPERATIONS[name]
    return Then(make(), call).double()


@pytest.mark.filterwarnings("ignore:module. its buffer")  # a spectral norm's vectors
@pytest.mark.parametrize("order", [2, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_way_equals_a_plain_loop(name: str, order: int) -> None:
    network, tasks = network_of(name), made((6, 6, 6))
    plain = copy.deepcopy(network)
    if name == "checkpoint":  # a plain loop would compute the block again with other weights
        plain.call = nn.Module.__call__
    # Torch's own second derivative of weight norm is wrong: see below.
    right = instead() if name == "weight norm" else contextlib.nullcontext()
    with sdpa_kernel(SDPBackend.MATH), right:
        expected, gradients = by_loop(plain, tasks, STEPS, LR, order=order)
    for how, way in WAYS:
        options = {"compile": True} if how == "compiled" else {"batching": how}
        learner = maml.MAML(network, inner_lr=LR, inner_steps=STEPS, order=order, **options)
        learner.learner.config = with_values(learner.learner.config, meta_gradient=way)
        network.zero_grad()
        loss = learner(stacked(tasks))
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            torch.testing.assert_close(
                parameter.grad, gradient, rtol=1e-10, atol=1e-12, msg=f"{how}, {way}"
            )
        together = how != "tasks" and name != "checkpoint"
        assert learner._plans.known[True].batching == ("vmap" if together else "tasks")
        quick = learner._compiling.quickly(learner.learner, stacked(tasks)) is not None
        assert quick == (how == "compiled" and name not in NOT_COMPILED)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in LEFT_OUT])
def test_derivatives_are_those_of_differences(name: str) -> None:
    network = explicit(network_of(name), name)
    own = {n: p.detach().requires_grad_() for n, p in network.named_parameters()}
    x = torch.randn(2, 4, 4, dtype=torch.float64)

    def answers(*given: Tensor) -> Tensor:
        return apply(network, dict(zip(own, given, strict=True)), x)[0]

    assert torch.autograd.gradcheck(answers, [*own.values()], fast_mode=True)
    assert torch.autograd.gradgradcheck(answers, [*own.values()], fast_mode=True)


class Automatic(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.network(x)


@pytest.mark.filterwarnings("ignore:module. its buffer")
@pytest.mark.parametrize("name", OPERATIONS)
def test_bf16_is_as_near_to_float32_as_a_plain_loop_under_autocast(name: str) -> None:
    """Of gradients, by autocast in ``forward``, and of a module in bf16 (at most 1 % more)."""
    network = network_of(name).bfloat16().float()
    tasks = [tuple(t.float() if t.is_floating_point() else t for t in task) for task in made()]
    plain = copy.deepcopy(network)
    plain.call = nn.Module.__call__ if name == "checkpoint" else plain.call
    right = instead() if name == "weight norm" else contextlib.nullcontext()
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False), right:
        exact, rounded = (
            torch.cat([g.flatten() for g in by_loop(each, tasks, STEPS, LR)[1]])
            for each in (plain, Automatic(plain))
        )
    within = 1.5 * (rounded - exact).norm() + 0.01 * exact.norm()
    for batching in ("vmap", "tasks"):
        for low in (Automatic(network), copy.deepcopy(network).bfloat16()):
            low.zero_grad()
            learner = maml.MAML(low, inner_lr=LR, inner_steps=STEPS, batching=batching)
            learner(stacked(tasks)).backward()
            assert learner._plans.known[True].batching == batching or name == "checkpoint"
            gradients = [parameter.grad for parameter in low.parameters()]
            assert {g.dtype for g in gradients} == {p.dtype for p in low.parameters()}
            found = torch.cat([g.float().flatten() for g in gradients])
            assert (found - exact).norm() < within


# ---- what torch lacks: when one of these fails, torch's own operation may serve ----------------

ONLY_ALONE = [
    *("lstm", "gru", "rnn", "lstm, packed", "gru, packed", "rnn, packed"),
    *("layer norm", "instance norm", "embedding", "spectral norm"),
]


@pytest.mark.parametrize("name", ONLY_ALONE)
def test_torch_still_fails_over_tasks(name: str) -> None:
    """It raises an error, or the meta-gradient is off."""
    network, x = network_of(name), torch.randn(3, 6, 4, 4, dtype=torch.float64)
    params = dict(network.named_parameters())

    def outer(x: Tensor) -> Tensor:
        def inner(at: Params) -> Tensor:
            buffers = {n: buffer.clone() for n, buffer in network.named_buffers()}
            return torch.func.functional_call(network, {**at, **buffers}, x).square().mean()

        found = torch.func.grad(inner)(params)
        return inner({n: p - 0.5 * found[n] for n, p in params.items()})

    def gradient(losses: Tensor) -> Tensor:
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(losses.sum(), [*params.values()])]
        )

    with instead():
        alone = gradient(torch.stack([*map(outer, x)]))
        together = gradient(torch.func.vmap(outer)(x))
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)
    with contextlib.suppress(RuntimeError):
        by_torch = gradient(torch.func.vmap(outer)(x))
        assert (by_torch - alone).norm() > 1e-3 * alone.norm()


def test_torch_still_has_a_wrong_second_derivative_of_weight_norm() -> None:
    v = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    g = torch.randn(4, 1, dtype=torch.float64, requires_grad=True)
    with pytest.raises(GradcheckError):
        torch.autograd.gradgradcheck(torch._weight_norm, (v, g))
    with instead():
        assert torch.autograd.gradgradcheck(torch._weight_norm, (v, g))
        for dim in (0, -2):  # the same
            torch.testing.assert_close(
                torch._weight_norm(v, g, dim), v * g / v.norm(dim=1)[:, None]
            )


def test_torch_still_computes_a_block_again_with_other_weights() -> None:
    network, x = network_of("checkpoint"), torch.randn(2, 4, 4, dtype=torch.float64)
    given = {n: 2 * p.detach() for n, p in network.named_parameters()}

    def gradient() -> Tensor:
        leaves = {n: t.requires_grad_() for n, t in given.items()}
        with sdpa_kernel(SDPBackend.MATH):
            found = torch.func.functional_call(network, leaves, x).square().sum()
            return torch.autograd.grad(found, leaves["layer.linear1.weight"])[0]

    by_torch, network.call = gradient(), nn.Module.__call__
    assert (by_torch - gradient()).norm() > 0.01 * gradient().norm()
