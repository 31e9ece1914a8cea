"""The loss and gradient of ``maml.MAML(module)``, against plain loops of torch."""

import contextlib
import copy
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured
from torch.utils.checkpoint import checkpoint

import maml
from maml.execution.outside import globals_of
from maml.kernels.convnet import ConvNet
from maml.networks.conv4 import Conv4
from maml.ops.instead import instead
from tests.library.own_networks import (
    Branching,
    Judge,
    Tempered,
    Tied,
    TwoOutputs,
    Waves,
    by_loop,
    dense,
    learning,
    made,
    of_both,
    of_words,
    stacked,
)
from tests.metagradient.test_plan import Layer, Recurrent


class Buffers(nn.Module):
    """A complex buffer, one that a layer writes and another layer reads, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 8), nn.Linear(8, 3)
        for layer, seen in zip((self.one, self.other), [torch.zeros(8).double()] * 2, strict=True):
            layer.register_buffer("seen", seen)
        self.register_buffer("turn", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.gain = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x.flatten(1)) * self.gain
        self.one.seen.copy_(hidden.detach().mean(0))
        return self.other((hidden * self.turn).real.tanh() + self.other.seen)


class Keeping(nn.Module):
    """A layer that keeps the start of its answers, as a recurrent network its state."""

    start: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.start is None or len(self.start) != len(x):
            self.start = x.new_zeros(len(x), 3)
        return self.start + self.layer(x.flatten(1))


class Inspecting(nn.Module):
    """A network that looks for its layers, clamps gradients, and has a context for checkpoints."""

    again = True

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        own = contextlib.nullcontext(), contextlib.nullcontext()
        again = functools.partial(
            checkpoint, self.body, use_reentrant=False, context_fn=lambda: own
        )
        hidden = (again if self.again else self.body)(x.flatten(1))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        (norm,) = (layer for layer in self.modules() if isinstance(layer, nn.BatchNorm1d))
        return self.head(hidden * norm.num_features**-0.5 + norm.weight)


class Slope(nn.Linear):
    """Its outputs have their own derivative by the inputs in them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).detach().requires_grad_()
        answers = super().forward(x).tanh()
        (slope,) = torch.autograd.grad(answers.square().sum(), x, create_graph=True)
        return answers + slope[:, :3]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dense": dense,
    "slope": lambda: Slope(16, 3).double(),
    "batch norm": lambda: dense(nn.BatchNorm1d(8)),
    "lstm": lambda: nn.Sequential(Recurrent(nn.LSTM), nn.Linear(4, 3)).double(),
    "branching": lambda: Branching().double(),
    "tied": lambda: Tied().double(),
    "weight norm": lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(16, 3))).double(),
    "two outputs": lambda: TwoOutputs().double(),
    "words": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double(),
    "buffers": Buffers,
    "inspecting": lambda: Inspecting().double(),
    "keeping": lambda: Keeping().double(),
    "pruned": lambda: nn.Sequential(
        nn.Flatten(), l1_unstructured(nn.Linear(16, 3).double(), "weight", 0.5)
    ),
}
NETWORKS |= {"complex": Waves, "a loss that learns": dense}
LOSSES: dict[str, Any] = {"two outputs": of_both, "words": of_words, "buffers": Judge()}
LOSSES["a loss that learns"] = Tempered().double()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, (6, 6, 6)) for name in NETWORKS if name != "inspecting"),
        *(("lstm", (3, 6, 9)), ("batch norm", (6,)), ("inspecting", (6,))),
        *(("complex", (3, 6, 9)), ("a loss that learns", (3, 6, 9))),
        ("batch norm", (6, 3, 6, 9, 6, 3)),
    ],
)
def test_loss_and_gradient_are_a_plain_loop_s(name: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]()
    if name == "buffers":  # `double` would part the buffer that two layers share
        network.one.double(), network.other.double()
        network.other.seen = network.one.seen  # type: ignore[union-attr]
    tasks, loss_of = made(sizes), LOSSES.get(name, F.cross_entropy)
    if name == "words":  # each example has four words, with a target each
        tasks = [(a, b[:, None].expand(-1, 4), c, d[:, None].expand(-1, 4)) for a, b, c, d in tasks]
    plain: Any = network if name == "pruned" else copy.deepcopy(network)  # torch cannot copy it
    plain.again = False  # torch's `functional_call` computes a checkpoint with other weights
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=3, loss=LOSSES.get(name))
    if name == "buffers":  # the learner sees the change of a tensor that it shares
        network.gain.fill_(2.0), plain.gain.fill_(2.0)  # type: ignore[operator]
        with pytest.warns(UserWarning, match="^module: its buffer one.seen: "):  # only once
            learner(tasks)
    # Torch's own weight norm has a wrong second derivative.
    with instead() if name == "weight norm" else contextlib.nullcontext():
        expected, gradients = by_loop(plain, tasks, 3, 0.1, loss_of)
    forms = [tasks] if len(set(sizes)) > 1 else [tasks, stacked(tasks)]
    for form in forms:
        learned = [*network.parameters(), *learning(loss_of)]
        learner.zero_grad()
        loss = learner(form)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for parameter, gradient in zip(learned, gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        tested = learner.evaluate(form, steps=3)
        torch.testing.assert_close(tested["loss"].mean(), expected)
        assert all(torch.equal(each, tested[metric]) for metric, each in learner.metrics.items())
    assert len([*learner.parameters()]) == len(gradients)
    if name == "two outputs":  # a learner whose loss is not the network's alone
        other = maml.CAVIA(network, loss=of_both)
        torch.testing.assert_close(other.evaluate(tasks)["loss"].mean(), other(tasks))


def rate(value: Any) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


@pytest.mark.parametrize("batching", ["auto", "tasks"])
@pytest.mark.parametrize("form", ["one", "by step", "list", "pattern", "of body alone"])
def test_inner_rates_of_one_s_own(form: str, batching: Any) -> None:
    """Numbers stay, parameters learn; the gradient is a plain loop's, also by adapting."""
    torch.manual_seed(0)
    one, by_step, network = rate(0.2), rate([0.1, 0.3]), dense()
    given: Any = {
        "one": one, "by step": by_step, "list": [one, 0.1],
        "pattern": {"*": 0.1, "*.weight": [0.3, one], "3.*": by_step},
        "of body alone": {"1.*": one},
    }[form]  # fmt: skip
    adapts = "1.*" if form == "of body alone" else "*"
    rates: dict[str, Callable[[str, int], Any]] = {
        "one": lambda name, step: one,
        "by step": lambda name, step: by_step[step],
        "list": lambda name, step: (one, 0.1)[step],
        "pattern": lambda name, step: by_step[step] if name[0] == "3"
        else (0.3, one)[step] if name.endswith("weight") else 0.1,
        "of body alone": lambda name, step: one if name[0] == "1" else 0.0,
    }  # fmt: skip
    flags: Any = {"inner_steps": 2, "adapt": adapts, "batching": batching}
    learner = maml.MAML(network, inner_lr=given, **flags)
    learned = [r for r in (one, by_step) if any(r is p for p in learner.parameters())]
    assert len([*learner.parameters()]) == 4 + len(learned) and learned
    expected, gradients = by_loop(network, made(), 2, rates[form], more=learned)
    for _ in range(2):
        learner.zero_grad()
        loss = learner(made())
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for parameter, gradient in zip([*network.parameters(), *learned], gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    x, y, query_x, query_y = made()[0]
    own = F.cross_entropy(learner.adapt(x, y, steps=3)(query_x), query_y)  # the last rate goes on
    assert torch.autograd.grad(own, learned)[0].any()


@pytest.mark.parametrize("learns", ["", "inner", "both", "one"])
def test_the_inner_loop_may_have_another_loss(learns: str) -> None:
    torch.manual_seed(0)
    network, both = dense(), Tempered().double()
    inner: Any = both if learns else lambda o, y: F.cross_entropy(o.tanh(), y)
    outer: Any = {"both": Tempered().double(), "one": both}.get(learns)
    loss_of = F.cross_entropy if outer is None else outer
    more = learning(inner) if inner is not outer else []
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=2, loss=outer, inner_loss=inner)
    expected, gradients = by_loop(network, made(), 2, 0.1, loss_of, inner, more)
    for _ in range(2):
        learner.zero_grad()
        loss = learner(made())
        loss.backward()
        torch.testing.assert_close(loss, expected)
        learned = [*network.parameters(), *learning(loss_of), *more]
        for parameter, gradient in zip(learned, gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
    assert {*learned} == {*learner.parameters()}
    torch.testing.assert_close(learner.evaluate(made(), steps=2)["loss"].mean(), expected)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_a_loss_does_not_see_what_forward_keeps(keeps: bool, direct: bool) -> None:
    class Kept(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.store = types.SimpleNamespace(kept=torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            answers = super().forward(x)
            self.store.kept = answers.mean() if keeps else self.store.kept
            return answers

    network = dense(Kept())
    reached = network[2].store if direct else network[2]

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) + getattr(reached, "store", reached).kept

    warned = pytest.warns(UserWarning, match="^loss: it reaches the module, where forward keeps")
    with warned if keeps else warnings.catch_warnings(action="error"):
        maml.MAML(network, loss=loss)(made())
    assert globals_of((lambda outputs: F.relu(outputs.torch)).__code__) == {"F"}


def test_mini_batches_are_of_each_task_s_own_random_order() -> None:
    torch.manual_seed(0)
    x, y, seen = torch.randn(6, 4, 4).double(), torch.arange(6.0).double(), list[frozenset[float]]()
    learner = maml.Reptile(
        dense(), inner_batch=3, inner_steps=2, batching="tasks",
        loss=lambda o, y: seen.append(frozenset(y.tolist())) or F.mse_loss(o[:, 0], y),
    )  # fmt: skip
    learner([(x, y, x, y)] * 4), seen.clear(), learner([(x, y, x, y)] * 4)
    halves = {places for places in seen if len(places) == 3}
    assert len(halves) > 2 and all(frozenset(range(6)) - half in halves for half in halves)


def test_kernels_serve_conv4(monkeypatch: pytest.MonkeyPatch) -> None:
    call, served = ConvNet._call, list[str]()
    monkeypatch.setattr(ConvNet, "_call", lambda *given: served.append(given[1]) or call(*given))
    tasks = [
        (torch.rand(5, 1, 28, 28), torch.arange(5), torch.rand(5, 1, 28, 28), torch.arange(5))
        for _ in range(2)
    ]
    torch.manual_seed(0)
    network = Conv4((1, 28, 28), 5, filters=16, pool=True)
    maml.MAML(network)(tasks).backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert "gradient" in served


@pytest.mark.parametrize("sizes", [(6,), (3, 6), (6, 6)])
def test_what_counts_its_calls_is_refused(sizes: tuple[int, ...]) -> None:
    calls = iter(range(1, 10**9))
    network = Layer(lambda _, h: h[:, 0, :3] * next(calls)).double()
    with pytest.raises(ValueError, match="counts its calls"):
        maml.MAML(network)(made(sizes))
