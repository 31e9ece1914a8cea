"""``maml.MAML(module)`` and its family, against plain loops of torch."""

import contextlib
import contextvars
import copy
import functools
import itertools
import threading
import time
import warnings
import weakref
from collections import UserDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.prune import l1_unstructured
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import maml
from datasets.tasks import Task
from maml.execution.outside import globals_of
from maml.execution.threads import spread
from maml.kernels.convnet import ConvNet
from maml.networks.conv4 import Conv4
from maml.networks.stack import remembering
from tests.launching import run, torchrun
from tests.metagradient.test_batching import Layer, Recurrent

Tasks = list[tuple[Tensor, Tensor, Tensor, Tensor]]


def dense(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), *more, nn.Tanh(), nn.Linear(8, 3)).double()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one if x[0, 0, 0] > 0 else self.other)(x.flatten(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.flatten(1))))[:, :3]


class TwoOutputs(nn.Module):
    context_layer = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.size = nn.Linear(16, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = torch.tanh(self.body(x.flatten(1)))
        return {"classes": self.classes(features), "more": (self.size(features), len(x))}


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


class Remembering(nn.Linear):
    """A layer whose query answers depend on its answers to the support set."""

    kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        answers = super().forward(x.flatten(1))
        if len(x) == 6:  # a support set
            self.kept = answers.mean(0)
        return answers + self.kept


class Skipping(nn.Linear):
    """A layer that is skipped by chance, or whose draws restore the generator."""

    def __init__(self, *, forked: bool) -> None:
        super().__init__(8, 8)
        self.forked = forked

    def forward(self, x: Tensor) -> Tensor:
        if self.forked:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return super().forward(F.dropout(x))
        return x if torch.rand(()) < 0.5 else super().forward(x)


class Judge(nn.CrossEntropyLoss):
    """A loss with a frozen network and a buffer of another type than the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3).double().requires_grad_(False)
        self.register_buffer("share", torch.tensor(0.5))

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        assert self.share.dtype == torch.float32
        return super().forward(self.body(outputs), y) * self.share


class Tempered(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        return super().forward(outputs * self.heat, y)


class ByName(nn.Linear):
    head_prefix = "b"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, 0])


class Linked(nn.Module):
    """A function that leads to the module itself; and a hook, a reference, and a lock."""

    def __init__(self, *, more: bool) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(1.5)), nn.Linear(16, 3)
        self.drop = lambda h: F.dropout(h, 0.5, self.training) * self.scale
        self.double().kept = dict[str, Tensor]()
        if more:
            self.layer.whole, self.lock = weakref.ref(self), threading.Lock()  # type: ignore
            self.layer.register_forward_hook(
                lambda layer, _, h: self.kept.update(h=h * layer.whole().scale)
            )
            self.last = self(torch.zeros(1, 16).double())  # torch cannot copy it

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x.flatten(1))
        return self.drop(self.kept.get("h", hidden))


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


def hooked(norm: nn.Module) -> nn.Module:
    norm.register_full_backward_hook(lambda *given: None)
    return norm


class Gated(nn.Linear):
    """Has several inputs."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) * gate[:, None]


def of_both(outputs: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs["classes"], y) + outputs["more"][0].square().mean()


def of_words(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten())


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
LOSSES: dict[str, Any] = {"two outputs": of_both, "words": of_words, "buffers": Judge()}
HEAD = {"head": "3"}
LEARNERS: list[tuple[type[maml.MetaLearner], dict[str, Any]]] = [
    (maml.MAML, {"adapt": "*,1.*=0.5"}),
    (maml.MAML, {"inner_optimizer": "adam"}),
    (maml.MAML, {"order": 1}),
    (maml.MAML, {}),
    (maml.ANIL, HEAD),
    (maml.BOIL, HEAD),
    (maml.MetaSGD, {}),
    (maml.MetaCurvature, {}),
    (maml.MAMLpp, {}),
    (maml.ProtoNet, HEAD),
    (maml.ProtoNet, {}),
    (maml.R2D2, HEAD),
]


def made(sizes: tuple[int, ...] = (6, 6, 6)) -> Tasks:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            *(torch.randn(n, 4, 4, generator=generator).double(), torch.arange(n) % 3),
            *(torch.randn(5, 4, 4, generator=generator).double(), torch.arange(5) % 3),
        )
        for n in sizes
    ]


def stacked(tasks: Tasks) -> Any:
    return tuple(torch.stack(parts) for parts in zip(*tasks, strict=True))


def by_loop(
    network: nn.Module, tasks: Tasks, steps: int, lr: float, loss_of: Any = F.cross_entropy
) -> tuple[Tensor, list[Tensor]]:
    params = dict(network.named_parameters())
    total = torch.zeros((), dtype=torch.float64)
    for support_x, support_y, query_x, query_y in tasks:
        at = params
        for _ in range(steps):
            outputs = torch.func.functional_call(network, at, support_x)
            loss = loss_of(outputs, support_y)
            by = torch.autograd.grad(
                loss, list(at.values()), create_graph=True, materialize_grads=True,
                allow_unused=True,
            )  # fmt: skip
            at = {n: p - lr * g for (n, p), g in zip(at.items(), by, strict=True)}
        outputs = torch.func.functional_call(network, at, query_x)
        total = total + loss_of(outputs, query_y) / len(tasks)
    return total.detach(), list(torch.autograd.grad(total, list(params.values())))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, (6, 6, 6)) for name in NETWORKS if name != "inspecting"),
        *(("lstm", (3, 6, 9)), ("batch norm", (6,)), ("inspecting", (6,))),
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
    expected, gradients = by_loop(plain, tasks, 3, 0.1, loss_of)
    forms = [tasks] if len(set(sizes)) > 1 else [tasks, stacked(tasks)]
    for form in forms:
        network.zero_grad()
        loss = learner(form)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        tested = learner.evaluate(form, steps=3)
        torch.testing.assert_close(tested["loss"].mean(), expected)
        assert all(torch.equal(each, tested[metric]) for metric, each in learner.metrics.items())
    if name == "two outputs":  # a learner whose loss is not the network's alone
        other = maml.CAVIA(network, loss=of_both)
        torch.testing.assert_close(other.evaluate(tasks)["loss"].mean(), other(tasks))


def test_torch_has_the_second_derivative_of_weight_norm() -> None:
    v = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    g = torch.randn(4, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v, g: torch._weight_norm(v, g, 0), (v, g))


@pytest.mark.parametrize("derives", [False, True])
def test_what_threads_would_share_is_computed_by_one(derives: bool) -> None:
    """Outputs that a loss keeps meanwhile, and torch's levels of forward derivatives."""
    kept, calls = dict[str, Tensor](), list[float]()

    def halved(outputs: Tensor) -> Tensor:
        time.sleep(0.01)
        return outputs.square() / 2

    def slow(outputs: Tensor, y: Tensor) -> Tensor:
        if derives:
            ones = torch.ones_like(outputs)
            return F.cross_entropy(torch.func.jvp(halved, (outputs,), (ones,))[1], y)
        kept["outputs"] = outputs
        calls.append(time.monotonic())
        time.sleep(0.01)
        return F.cross_entropy(kept["outputs"], y)

    torch.set_num_threads(2)
    network = dense()
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=1, loss=slow, batching="tasks")
    expected, _ = by_loop(network, made(), 1, 0.1)
    torch.testing.assert_close(learner(made()), expected)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_loss_does_not_see_what_forward_keeps(keeps: bool) -> None:
    class Kept(nn.Linear):
        kept = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            answers = super().forward(x)
            self.kept = answers.mean() if keeps else self.kept
            return answers

    network = dense(Kept(8, 8))

    def loss(outputs: Tensor, y: Tensor, layer: Any = network[2]) -> Tensor:
        return F.cross_entropy(outputs, y) + layer.kept

    warned = pytest.warns(UserWarning, match="^loss: it reaches the module, where forward keeps")
    with warned if keeps else warnings.catch_warnings(action="error"):
        maml.MAML(network, loss=loss)(made())
    assert globals_of((lambda outputs: F.relu(outputs.torch)).__code__) == {"F"}


def test_threads_share_a_learner() -> None:
    """Parameters that one thread has adapted never reach another thread."""
    learner = maml.MAML(dense(), inner_lr=0.1, inner_steps=2, batching="tasks")
    expected, seen, done = learner(made()), set(), threading.Event()

    def adapts() -> None:
        while not done.is_set():
            with torch.no_grad():
                seen.add(float(learner.adapt(*made()[0][:2])(made()[0][2]).sum()))

    thread = threading.Thread(target=adapts)
    thread.start()
    try:
        for _ in range(30):
            learner.zero_grad()
            loss = learner(made())
            loss.backward()
            assert loss == expected
            assert all(parameter.grad is not None for parameter in learner.parameters())
    finally:
        done.set()
        thread.join()
    assert len(seen) == 1


@pytest.mark.parametrize("what", ["answer", "evaluate"])
def test_training_keeps_its_dropout_while_another_thread_tests(what: str) -> None:
    network, seen, done, me = dense(), set[bool](), threading.Event(), threading.current_thread()
    network[1].register_forward_hook(
        lambda module, *_: seen.add(module.training) if threading.current_thread() is me else None
    )
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=2)
    learner(made()), seen.clear()  # the first call tests the network, without dropout
    fast = learner.adapt(*made()[0][:2]).eval()
    call = (lambda: fast(made()[0][2])) if what == "answer" else lambda: learner.evaluate(made())
    thread = threading.Thread(target=lambda: [call() for _ in iter(done.is_set, True)])
    thread.start()
    for _ in range(20):
        learner(made())
    done.set(), thread.join()
    assert seen == {True}


def test_loading_waits_for_a_call_in_another_thread() -> None:
    network, inside = dense(), threading.Event()
    network[1].register_forward_hook(lambda *_: inside.set() or time.sleep(0.1))
    learner = maml.MAML(network, inner_lr=0.1)
    with torch.no_grad():
        fast = learner.adapt(*made()[0][:2])
    new = {name: tensor + 1 for name, tensor in learner.state_dict().items()}
    inside.clear()
    thread = threading.Thread(target=fast, args=made()[0][2:3])
    thread.start(), inside.wait(), learner.load_state_dict(new), thread.join()
    torch.testing.assert_close(dict(learner.state_dict()), new)


def test_threads_have_the_settings_of_the_caller() -> None:
    setting, me = contextvars.ContextVar[int]("setting"), threading.get_ident()
    setting.set(2), torch.set_num_threads(2)

    def found(owner: nn.Module) -> list[tuple[bool, int]]:
        here = lambda *_: (threading.get_ident() == me, setting.get())  # noqa: E731
        return [*spread(owner, here, range(2))]

    assert found(nn.Linear(1, 1)) == [(False, 2)] * 2
    assert found(nn.Linear(1, 1, device="meta")) == [(True, 2)] * 2
    with torch.device("meta"):
        assert found(nn.Linear(1, 1, device="cpu")) == [(True, 2)] * 2


def test_a_checkpoint_may_be_loaded_after_wrapping() -> None:
    network = dense(nn.BatchNorm1d(8)).eval()
    learner, other = maml.MAML(network), dense(nn.BatchNorm1d(8)).eval()
    other[2].running_mean.fill_(3.0)
    network.load_state_dict(other.state_dict())
    assert learner(made()) == maml.MAML(other)(made())


@pytest.mark.parametrize("more", [False, True])
def test_what_leads_to_the_module_leads_to_the_copy(more: bool) -> None:
    torch.manual_seed(0), torch.set_num_threads(2)
    network = Linked(more=more)
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=2)
    network.eval()
    for sizes in ((6, 6), (3, 6)):
        expected, gradients = by_loop(network, made(sizes), 2, 0.1)
        loss = learner.eval()(made(sizes))
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad(loss, [*network.parameters()])
        torch.testing.assert_close(found, tuple(gradients), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(learner.train().evaluate(made(sizes))["loss"].mean(), expected)


def test_what_is_frozen_later_is_refused() -> None:
    network = dense()
    learner = maml.MetaSGD(network)
    network.requires_grad_(False), learner(made()).backward()  # the rates learn alone
    network.requires_grad_(True)[1].bias.requires_grad_(False)
    for call in (learner, lambda tasks: learner.adapt(*tasks[0][:2])):
        with pytest.raises(maml.UserError, match=r"^1.bias was frozen after"):
            call(made())
    learner = maml.MAML(dense(nn.BatchNorm1d(8).eval()))
    learner.requires_grad_(False).requires_grad_(True)(made()).backward()
    assert [p.requires_grad for p in learner.parameters()].count(False) == 2  # running statistics


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


def test_an_output_layer_may_share_its_weight() -> None:
    """The weight is the output layer's under any name, and stays when this layer is removed."""
    of_head = {"first": {"first.weight", "first.bias"}, "second": {"first.weight", "second.bias"}}
    for head, names in of_head.items():
        learner = maml.ANIL(Tied(), head=head).learner
        assert learner.adapting.keys() == {f"module.{name}" for name in names}
        adapting = maml.MAML(Tied(), adapt=f"{head}.*").learner.adapting
        assert adapting.keys() == learner.adapting.keys()
    twice = Tied()
    twice.last = twice.second  # the layer itself under a second name
    assert maml.ANIL(twice, head="last").learner.adapting.keys() == learner.adapting.keys()
    network = Tied().double()
    network.second.bias.requires_grad_(False)
    maml.ProtoNet(network, head="second")
    assert not network.second.bias.requires_grad
    network.second.bias.requires_grad_(True)
    plain: Any = copy.deepcopy(network)
    plain.first = nn.Identity()
    for learner in (maml.ProtoNet(network, head="first"), maml.ProtoNet(plain)):
        learner(made()).backward()
    torch.testing.assert_close(network.first.weight.grad, plain.second.weight.grad)
    frozen = maml.ProtoNet(network, head="first", freeze="first.*").learner.frozen
    assert frozen == ["module.second.weight"]


def test_a_class_of_one_s_own_may_have_any_name() -> None:
    network, own = dense(), type("NoAdapt", (maml.MAML,), {})
    assert own(network)(made()) == maml.MAML(network)(made())


@pytest.mark.parametrize(("kind", "flags"), LEARNERS)
def test_an_outer_loss_of_one_s_own_has_the_same_gradient(
    kind: type[maml.MetaLearner], flags: dict[str, Any]
) -> None:
    """The graph of `adapt` gives the gradient of the fast way, for all parameters."""
    torch.manual_seed(0)
    steps = {} if kind in (maml.ProtoNet, maml.R2D2) else {"inner_steps": 2}
    network = dense()
    if kind is maml.MAML and not flags:  # fused attention has no second derivative
        network.insert(0, nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).double())
    learner = kind(network, **steps, **flags)
    network[-1].weight.register_hook(lambda slope: 2 * slope)  # of the meta-gradient alone
    tasks = made()
    loss = learner(tasks)
    loss.backward()
    found = [parameter.grad for parameter in learner.parameters()]
    assert torch.compile(learner, backend="eager")(tasks) == loss
    own = torch.stack([F.cross_entropy(learner.adapt(*t[:2])(t[2]), t[3]) for t in tasks]).mean()
    expected = torch.autograd.grad(own, list(learner.parameters()))
    torch.testing.assert_close(loss, own)
    torch.testing.assert_close(found, [*expected], rtol=1e-10, atol=1e-12)
    evaluated = learner.evaluate(tasks)
    torch.testing.assert_close(evaluated["loss"].mean(), own.detach())
    assert {*evaluated} >= {"loss", "accuracy", "non_transductive_accuracy"}


def test_it_trains_as_any_module(tmp_path: Path) -> None:
    """Optimizer, scheduler, clipping and ``state_dict`` are torch's; the module's tensors learn."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2),
                            nn.Linear(8, 3))  # fmt: skip
    learner = maml.MAML(network, inner_lr=0.1, inner_steps=2)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    tasks = tuple(t.float() if t.is_floating_point() else t for t in stacked(made()))
    before = learner.evaluate(tasks)["loss"].mean()
    assert torch.equal(learner.evaluate(tasks)["loss"].mean(), before)  # without dropout
    for _ in range(20):
        loss = learner(tasks)
        loss.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert learner.training
    assert learner.metrics["accuracy"].shape == (3,)
    after = learner.evaluate(tasks)["loss"].mean()
    assert after < before - 0.2
    with torch.no_grad():  # the outer loss needs no graph
        assert not learner(tasks).requires_grad
    assert isinstance(network[2], nn.BatchNorm1d)
    torch.save(maml.MAML(network, loss=nn.CrossEntropyLoss()), tmp_path / "whole.pt")
    assert torch.load(tmp_path / "whole.pt", weights_only=False)(tasks).isfinite()
    torch.save(learner.state_dict(), tmp_path / "learner.pt")
    other = maml.MAML(copy.deepcopy(network), inner_lr=0.1, inner_steps=2)
    other.load_state_dict(torch.load(tmp_path / "learner.pt", weights_only=True))
    torch.testing.assert_close(other.evaluate(tasks)["loss"].mean(), after)
    fast = other.eval().adapt(tasks[0][0], tasks[1][0])
    torch.testing.assert_close(
        fast(tasks[2][0][:1], "support"), fast(tasks[2][0], "support")[:1], rtol=1e-4, atol=1e-5
    )


def test_kernels_serve_conv4_and_any_loss_and_targets_do(monkeypatch: pytest.MonkeyPatch) -> None:
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
    points = torch.rand(3, 7, 1), torch.rand(3, 7, 1), torch.rand(3, 4, 1), torch.rand(3, 4, 1)
    net = nn.Sequential(nn.Linear(1, 9), nn.ReLU(), nn.Linear(9, 1))
    regression = maml.MAML(net, loss=F.l1_loss)
    regression(points).backward()
    assert regression.metrics == {}
    # Integer targets are classes, whatever the loss.
    weighted = maml.MAML(network, loss=nn.CrossEntropyLoss(weight=torch.rand(5)))
    weighted(tasks).backward()
    assert weighted.metrics["accuracy"].shape == (2,)
    # As in torch's cross-entropy of sequences, the classes are the second dimension.
    words = [tuple(torch.randint(7, (4, 6)) for _ in range(4))] * 2
    tokens = nn.Sequential(nn.Embedding(7, 6), nn.Conv1d(6, 7, 1))
    learner = maml.MAML(tokens)
    learner(words).backward()  # type: ignore[arg-type]
    assert learner.metrics["accuracy"].shape == (2,)


def found_with(network: nn.Module, steps: int) -> list[Tensor]:
    """Return what training, a user's own outer loss and an evaluation compute."""
    network.zero_grad()
    x = torch.randn(2, 6, 1, 12, 12, generator=torch.Generator().manual_seed(0)).double()
    task = x[0], torch.arange(6) % 3, x[1], torch.arange(6) % 3
    learner = maml.MAML(network, inner_lr=0.3, inner_steps=steps)
    learner([task, task]).backward()
    params = [*network.parameters()]
    found: list[Any] = [parameter.grad for parameter in params]
    fast = learner.adapt(*task[:2], steps=steps)
    answers = fast(task[2]), fast(task[2], "support")
    assert not torch.equal(*answers)
    for of_either in answers:
        loss = F.cross_entropy(of_either, task[3])
        found += [of_either, *torch.autograd.grad(loss, params, retain_graph=True)]
    return found + [*learner.evaluate([task]).values()]


def test_blocks_for_networks_of_one_s_own() -> None:
    """They equal torch's layers, in training and with the support set's statistics."""
    torch.manual_seed(0)
    blocks = maml.nn.ConvBlocks((1, 12, 12), filters=8, layers=2, pool=True).double()
    own = nn.Sequential(blocks, nn.Linear(blocks.n_features, 3).double())
    layers: list[nn.Module] = []
    for block in blocks.blocks:
        norm = nn.BatchNorm2d(8, eps=blocks.eps).double()
        norm.weight, norm.bias = block.norm.weight, block.norm.bias
        layers += [block.conv, norm, nn.ReLU(), nn.MaxPool2d(2)]
    plain = nn.Sequential(*layers, nn.Flatten(), own[1])
    torch.testing.assert_close(found_with(own, 2), found_with(plain, 2), rtol=1e-9, atol=1e-11)
    # Two stacks that share weights stay two stacks.
    means = maml.nn.ConvBlocks((1, 12, 12), filters=8, layers=2, pool=True, mean=True)
    means.blocks, x = blocks.blocks, torch.rand(6, 1, 12, 12).double()
    with remembering():
        assert [stack(x).shape[1] for stack in (blocks, means)] == [72, 8]
    with pytest.raises(ValueError, match="4 poolings leave nothing"):
        maml.nn.ConvBlocks((1, 12, 12), pool=True)


class Blockwise(nn.Module):
    """An output layer after a block that the backward pass may compute ``again``."""

    def __init__(self, size: int, *block: nn.Module, again: bool) -> None:
        super().__init__()
        self.block, self.head, self.again = nn.Sequential(*block), nn.Linear(size, 3), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return self.head(checkpoint(self.block, x, use_reentrant=False))
        return self.head(self.block(x))


def dropping(drop: nn.Module) -> Blockwise:
    block = nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), drop
    return Blockwise(8, *block, again=True).double()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_checkpointed_block_is_computed_again_by_its_own_weights(steps: int) -> None:
    """With batch norms and compiled blocks in it."""
    torch.manual_seed(0)
    blocks = maml.nn.ConvBlocks((1, 12, 12), filters=8, layers=1)
    size = blocks.n_features
    network = Blockwise(size, blocks, nn.BatchNorm1d(size), nn.Tanh(), again=False).double()
    expected = found_with(network, steps)
    network.again = True
    torch.testing.assert_close(found_with(network, steps), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "drop", [nn.Dropout(0.5), Skipping(forked=False), Skipping(forked=True)], ids=str
)
def test_draws_do_not_depend_on_threads_nor_on_what_came_before(drop: nn.Module) -> None:
    network = dropping(drop)
    network.again = not getattr(drop, "forked", False)
    learner, tasks = maml.MAML(network, inner_lr=0.1, inner_steps=2), made((6,) * 4)

    def gradient(threads: int, tasks: Tasks) -> Tensor:
        network.zero_grad()
        torch.manual_seed(3)
        torch.set_num_threads(threads)
        learner(tasks).backward()
        weight = next(network.block.parameters())
        assert weight.grad is not None
        return weight.grad.clone()

    for some in (tasks[:1], tasks):
        first = gradient(1, some)
        assert all(torch.equal(gradient(2, some), first) for _ in range(3))


def test_a_hook_keeps_for_the_loss_what_it_saw() -> None:
    """Threads would share the list, so one thread computes."""
    network, saw = dense(), list[Tensor]()
    network[2].register_forward_hook(lambda module, inputs, output: saw.append(output))
    network[3].register_forward_hook(lambda module, inputs, output: time.sleep(1e-3))

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) + saw.pop().square().mean()

    def gradient(batching: Any) -> Any:
        learner = maml.MAML(network, loss=loss, batching=batching)
        return torch.autograd.grad(learner(made((6,) * 8)), [*network.parameters()])

    torch.set_num_threads(2)
    expected = gradient("vmap")
    torch.testing.assert_close(gradient("tasks"), expected, rtol=1e-9, atol=1e-12)
    network[2]._forward_hooks.clear()
    network[2].register_forward_hook(functools.partial(lambda to, *given: to.append(given[2]), saw))
    torch.testing.assert_close(gradient("tasks"), expected, rtol=1e-9, atol=1e-12)


def test_what_draws_in_later_tasks_alone_draws_otherwise_each_time() -> None:
    class OfLargeSets(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) > 6 else x

    learner = maml.MAML(dropping(OfLargeSets()))
    learner(made())
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found += [learner(made((9, 9, 6))).item(), learner(made((9, 9, 6))).item()]
    assert found[:2] == found[2:4]
    assert len({*found}) == 4
    begins = maml.MAML(dense(nn.Dropout(0.0)))
    (rate,) = (m for m in begins.modules() if isinstance(m, nn.Dropout))
    assert begins(made()) == begins(made())
    rate.p = 0.5
    assert begins(made()) != begins(made())


def test_tasks_of_different_ways_and_modes_are_each_their_own() -> None:
    torch.manual_seed(0)
    learner = maml.ProtoNet(dense(nn.Dropout(0.5)), head="4").eval()
    three, two = made((6,)), [tuple(part[:4] % 2 if part.dtype == torch.int64 else part[:4]
                                    for part in made((6,))[0])]  # fmt: skip
    alone = [learner([*one]).item() for one in (three, two)]
    together = [*three, *two]
    assert learner(together).item() == pytest.approx(sum(alone) / 2, rel=1e-12)  # type: ignore[arg-type]
    assert learner.evaluate(together)["loss"].isfinite().all()  # type: ignore[arg-type]
    learner.train()
    assert learner(stacked(made())).item() != learner(stacked(made())).item()
    fast = maml.MAML(dense(nn.Dropout(0.5))).adapt(*made()[0][:2])
    x = made()[0][2]
    assert not torch.equal(fast(x), fast(x))
    fast.eval()
    assert torch.equal(fast(x), fast(x))


@pytest.mark.parametrize("kind", [maml.ProtoNet, maml.R2D2])
def test_support_and_query_may_be_padded_to_two_lengths(kind: type[maml.MetaLearner]) -> None:
    words, ids, y = (
        nn.EmbeddingBag(9, 4, padding_idx=0),
        torch.arange(1, 7)[:, None],
        torch.arange(6) % 3,
    )
    learner, padded = kind(words), [(ids, y, F.pad(ids, (0, 2)), y)]
    torch.testing.assert_close(learner(padded), learner([(ids, y, ids, y)]))
    torch.testing.assert_close(learner.evaluate(padded), learner.evaluate([(ids, y, ids, y)]))
    with pytest.raises(
        maml.UserError, match=r"have examples \[1\] and \[3\], which batch norms would"
    ):
        kind(nn.Sequential(words, nn.BatchNorm1d(4)))(padded)


def test_examples_may_have_several_inputs() -> None:
    """In order, or by name; as a batch or a list of tasks; also arrays."""
    several = [((a, a[:, 0, 0]), b, (c, c[:, 0, 0]), d) for a, b, c, d in made()]
    named = [
        ({"gate": gate, "x": x.numpy()}, b, UserDict(x=asked[0], gate=asked[1]), d)
        for (x, gate), b, asked, d in several
    ]
    together = pytree.tree_map(lambda *parts: torch.stack(parts), *several)
    collated = [list(part) if isinstance(part, tuple) else part for part in together]
    network = Gated(16, 3).double()
    expected, gradients = by_loop(network, several, 2, 0.1)
    learners = [
        maml.MAML(network, inner_lr=0.1, inner_steps=2),
        maml.ProtoNet(network),
        maml.Reptile(network, inner_lr=0.1, inner_steps=3, inner_batch=2),
    ]
    for form in (several, named, [named[0], *several[1:]], together, collated):
        network.zero_grad()
        loss = learners[0](form)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
        for learner in learners:
            torch.manual_seed(0)
            loss = learner(form)
            torch.manual_seed(0)
            torch.testing.assert_close(loss, learner(several))
    for learner in learners:
        answers = [learner.adapt(*task[:2])(task[2]) for task in (several[0], named[0])]
        assert torch.equal(*answers)


@pytest.mark.parametrize("kind", [maml.MAML, maml.ProtoNet])
def test_inputs_of_other_dtypes_are_no_batch(kind: type[maml.MetaLearner]) -> None:
    """`torch.cat` would make the booleans numbers, and networks tell masks apart by their dtype."""

    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x.flatten(1)) * (mask if mask.dtype == torch.bool else -mask)

    def tasks(of_booleans: Callable[[Tensor], Tensor]) -> Any:
        (a, b, c, d), (e, f, g, h) = made((5, 5))
        signs = [x[:, :3, 0].sign() for x in (a, c, e, g)]
        signs[0], signs[3] = (of_booleans(signs[i] > 0) for i in (0, 3))
        a, c, e, g = zip((a, c, e, g), signs, strict=True)
        return [(a, b, c, d), (e, f, g, h)]

    learner = kind(Masked(16, 3).double())
    mixed, alike = tasks(lambda mask: mask), tasks(lambda mask: -mask.double())
    torch.testing.assert_close(learner(mixed), learner(alike))
    torch.testing.assert_close(learner.evaluate(mixed), learner.evaluate(alike))


def of_experts(seed: int) -> list[Tensor]:
    """The data say which of two layers answers, so one process may meet only one of them."""
    torch.manual_seed(seed)
    learner, tasks = maml.MAML(Branching().double(), inner_lr=0.1), made()[:2]
    for sign, task in zip((1, -1), tasks, strict=True):
        task[0][0, 0] = task[2][0, 0] = sign
    learner(tasks).backward()
    return [parameter.grad for parameter in learner.parameters() if parameter.grad is not None]


def trained(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    network = dense()
    network.register_buffer("table", (torch.arange(10, dtype=torch.int16) + seed)[::2])
    network.register_buffer("wide", torch.full((1,), float(seed)).expand(3))
    network.register_buffer("sparse", (torch.eye(3 + seed) + seed)[:3, :3].to_sparse())
    network.attributes = [torch.rand(2)]  # type: ignore[assignment]
    network.plain = {"mask": np.full(2, seed), "gain": float(seed)}  # type: ignore[assignment]
    learner = maml.MAML(network, loss=Judge(), inner_lr=0.1, inner_steps=2)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = learner(stacked(made()))
        loss.backward()
        optimizer.step()
    ours: Any = next(m for m in learner.modules() if hasattr(m, "attributes"))
    held = [*ours.attributes, *map(torch.as_tensor, ours.plain.values())]
    return [loss.detach(), *held, *learner.state_dict().values(), *of_experts(seed)]


def refused(rank: int) -> None:
    """Tasks in another number, order, value or size."""
    tasks, learner = made(), maml.MAML(dense())
    if rank:
        learner.load_state_dict({n: t + 0.01 for n, t in learner.state_dict().items()})
    with pytest.raises(maml.UserError, match=r"^the parameters of rank 1 are not those"):
        learner(tasks)
    learner = maml.MAML(dense())
    moved = stacked([(a + 1e-12 * rank, *rest) for a, *rest in tasks])  # type: ignore[misc]
    named = [({"ab"[rank]: a, "ba"[rank]: a.sin()}, b, a, b) for a, b, *_ in tasks]
    for own in (tasks[rank:], tasks[:: 1 - 2 * rank], moved, made((6, 6, 5 + rank)), named):
        with pytest.raises(maml.UserError, match=r"^the tasks of rank 1 are not those"):
            learner(own)


def test_a_loop_of_one_s_own_is_distributed_by_torchrun(tmp_path: Path) -> None:
    """All processes have the parameters of rank 0, whatever they drew, or refuse the tasks."""
    script = tmp_path / "own.py"
    script.write_text(
        "import sys, torch, maml\nfrom tests.test_meta_learner import refused, trained\n"
        "rank = maml.distributed()\nrefused(rank)\n"
        "torch.save(trained(rank), f'{sys.argv[1]}.{rank}')\n"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[1])}
    run([*torchrun(2, [str(script), str(tmp_path / "both")])], 120, env=env)
    for rank in range(2):
        found = torch.load(tmp_path / f"both.{rank}", weights_only=True)
        torch.testing.assert_close(found, trained(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sizes", [(6,), (3, 6), (6, 6)])
def test_what_counts_its_calls_is_refused(sizes: tuple[int, ...]) -> None:
    calls = itertools.count(1)
    network = Layer(lambda _, h: h[:, 0, :3] * next(calls)).double()
    with pytest.raises(ValueError, match="counts its calls"):
        maml.MAML(network)(made(sizes))


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: maml.MAML(dense(), inner_lrr=1), "MAML takes no inner_lrr; .*inner_lr, "),
        (lambda: maml.MAML(dense(), inner_lr=np.float64(-1)), "inner_lr must be positive"),
        (lambda: maml.MAML(dense(), order=3), "order 3: 1 or 2"),
        (lambda: maml.MetaSGD(dense(), inner_steps=0), "inner_steps 0: MetaSGD would have no use"),
        (lambda: maml.MAML(dense(), loss=3), "loss is 3; give a function"),
        (lambda: maml.MAML(dense(), loss=nn.CrossEntropyLoss), "loss is <class .*; give a"),
        (lambda: maml.MAML(dense())(made()[0][0]), "tasks is a Tensor; give"),
        (lambda: maml.MAML(dense())({"train": 1}), "tasks is a dict; give"),  # type: ignore
        (lambda: maml.MAML(dense(), loss=F.nll_loss, label_smoothing=0.1), "0.1: needs the cross-"),
        (lambda: maml.MAML(dense(), head="4"), "head '4': no part of the module; .* are 1, 3$"),
        (lambda: maml.ANIL(nn.Linear(4, 3), head="weight"), "no part .* the module itself$"),
        (lambda: maml.ANIL(dense()), 'say which .* is: give head="name of the layer"'),
        (lambda: maml.MAML(dense())(3), r"tasks is a int; give \(support_x, "),
        (lambda: maml.MAML(dense())(made()[0]), "tasks: its tensors are .*; give"),
        (lambda: maml.MAML(dense())([t[:2] for t in made()]), r"task 0 is \(Tensor, Tensor\)"),
        (lambda: maml.MAML(dense().float())(made()), "support_x is torch.float64, .*float32"),
        (lambda: maml.MAML(dense())([(t[0], t[1][:2], *t[2:]) for t in made()]),
         "task 0: support_x has 6 examples, and support_y 2 targets"),
        (lambda: maml.MAML(dense()).adapt([], ["owl"]), "^adapt takes .* for maml.load"),
        (lambda: maml.MAML(dense()).evaluate(made(), steps=1.5), "steps 1.5: give a whole number"),
        (lambda: maml.MAML(nn.Linear), "module is <class .*Linear'>; give a torch.nn.Module"),
        (lambda: maml.MAML(dense())([(*t[:2], t[2][:0], t[3][:0]) for t in made()]),
         "task 0: query_x is empty"),
        (lambda: maml.R2D2(dense())([(t[0], t[1].double(), t[2], t[3].double()) for t in made()]),
         r"task 0: support_y is torch.float64 \[6\]; give the number of each example's class"),
        (lambda: maml.ProtoNet(dense())([(t[0], t[1] + 1, *t[2:]) for t in made()]),
         "task 0: support_y has no example of class 0"),
        (lambda: maml.ProtoNet(dense())([(t[0], 2 * t[1], *t[2:]) for t in made()]),
         "task 0: support_y has no example of class 1"),
        (lambda: maml.R2D2(dense())([(*t[:3], t[3] + 1) for t in made()]),
         "task 0: query_y has the label 3, and support_y no example of that class"),
        (lambda: maml.R2D2(dense()).adapt(made()[0][0], made()[0][1] - 1), "^support_y has .* -1;"),
        (lambda: maml.MAML(dense())([part[:0] for part in stacked(made())]), "^tasks is empty"),
        (lambda: maml.MAML(dense()).adapt(made()[0][0], made()[0][1].double()),
         "^support_y is torch.float64, .* give loss="),
        (lambda: maml.MAML(dense()).adapt(made()[0][0][0], made()[0][1][0]),
         r"support_y \[\]; give \[E, …\] each"),
        (lambda: maml.ProtoNet(dense())([(t[0][:0], t[1][:0], *t[2:]) for t in made()]),
         "task 0: support_x is empty"),
        (lambda: maml.MAML(dense())([3]), r"task 0 is \(int\); give"),
        (lambda: maml.MAML(dense())([(*t[:3], t[3] + 1) for t in made()]),
         "task 0: query_y has the label 3; the module tells 3 classes apart, .* from 0 to 2"),
        (lambda: maml.MAML(nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 3))),
         "0 makes sparse gradients.* sparse=False"),
        (torch.inference_mode()(lambda: maml.MAML(dense()).adapt(*made()[0][:2])),
         r"torch.inference_mode .* use torch.no_grad\(\)"),
        (lambda: maml.MAML(dense())([(t[0], t[1].double(), t[2], t[3].double()) for t in made()]),
         "query_y is torch.float64, .* give loss=.*cross_entropy for their shares .*, mse_loss"),
        (lambda: maml.MAML(Remembering(16, 3).double())(made()),
         "the loss reads a parameter that is not the module's.* function .*: as a method"),
        (lambda: maml.MAML(
            TwoOutputs().double(), loss=lambda o, y: F.cross_entropy(o["classes"], y))(made()),
         "^no loss reads size.bias, size.weight: make the learner again with freeze="),
        (lambda: maml.MAML(dense(torch.jit.script(nn.Tanh()))), "module: 2 .* before torch.jit"),
        (lambda: maml.MAML(torch.compile(dense())), "module: it is .* before torch.compile"),
        (lambda: maml.MAML(dense().bfloat16()), "module: its parameters are torch.bfloat16"),
        (lambda: maml.MAML(register_parametrization(nn.BatchNorm1d(3), "weight", nn.Softplus())),
         "hooks or a parametrization of its own"),
        (lambda: maml.MAML(hooked(nn.BatchNorm1d(3))), "hooks or a parametrization of its own"),
        (lambda: maml.MAML(dense(), batching="all"), "batching 'all': auto, vmap or tasks"),
        (lambda: maml.MAML(dense())([(t[0].clone().requires_grad_(), *t[1:]) for t in made()]),
         "task 0: support_x requires a gradient"),
        (lambda: maml.MAML(dense()).adapt(*made()[0][:2])(made()[0][2], "suport"),
         "batch_statistics 'suport': query or support"),
        (lambda: maml.MAML(dense())(made()).backward(create_graph=True), "create_graph: the loss"),
        (lambda: maml.MAML(ByName(4, 3).double()).adapt(*made()[0][:2], 0).features(made()[0][0]),
         "ByName: its output layer b is no layer"),
        (lambda: maml.MAML(dense(), loss=Tempered())(made()), "the loss reads .* by adapt"),
        (lambda: maml.MAML(TwoOutputs().double())(made()), "the module returns a dict; give loss="),
        (lambda: maml.MAML(dense())([(t[0], (t[1], t[1]), *t[2:]) for t in made()]),
         r"^task 0 is \(Tensor, tuple, Tensor, Tensor\); give"),
        (lambda: maml.MAML(dense())(Task(*stacked(made()))._replace(query_x={})),
         r"^tasks is \(Tensor, Tensor, dict, Tensor\); give"),
        (lambda: maml.MAML(dense())([({"a": t[0], "b": None}, *t[1:]) for t in made()]),
         r"^task 0: support_x\['b'\] is NoneType; give a tensor, or leave an input out"),
        (lambda: maml.MAML(dense())([((t[0], {"b": t[0][:2]}), *t[1:]) for t in made()]),
         r"^task 0: support_x\[1\]\['b'\] has 2 examples, and support_y 6 targets"),
        (lambda: maml.MAML(maml.MAML(dense())), "module is a MAML; give the module that it is"),
        (lambda: maml.MAML(maml.MAML(dense()).adapt(*made()[0][:2])), "is a FastModule; give"),
        (lambda: type("Own", (maml.ANIL,), {"loss": of_both})(dense()), "^Own.loss is never ca"),
        (lambda: setattr(maml.MAML(dense(), inner_lr=0.1), "inner_lr", 0.2),
         "inner_lr = 0.2: it is 0.1 since .* make the learner again"),
        (lambda: maml.MAML(nn.LazyLinear(3)), "module: weight has no size yet; call the"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(mistake: Callable[[], Any], says: str) -> None:
    with pytest.raises(maml.UserError, match=says) as found:
        mistake()
    assert "\n" not in str(found.value)
    assert "--" not in str(found.value)


def test_accuracy_is_of_classes_where_they_are() -> None:
    y = torch.arange(60).reshape(3, 5, 4) % 4
    last = 5.0 * F.one_hot(y, 4)
    ignored = y.clone()
    ignored[..., 2:] = -100
    half = torch.where(torch.arange(4) < 2, y, 3 - y)
    cases: list[tuple[Any, Tensor, Tensor, dict[str, float]]] = [
        (None, last.transpose(-1, -2), y, {"accuracy": 1.0}),
        (of_words, last, y, {"accuracy": 1.0}),
        (of_words, last, ignored, {"accuracy": 1.0}),
        (of_words, last, half, {"accuracy": 0.5}),
        (None, last.flatten(1, 2), ignored.flatten(1), {"accuracy": 1.0}),
        (lambda outputs, y: (outputs[:, 0] - y).square().mean(), y[..., :1] * 1.0, y[..., 0], {}),
    ]
    for loss, x, labels, expected in cases:
        same = nn.PReLU(init=1.0)  # returns its input, and has a parameter
        learner = maml.MAML(same, inner_lr=1e-3, loss=loss)
        learner((x, labels, x, labels))
        assert {name: float(found.mean()) for name, found in learner.metrics.items()} == expected


def test_labels_are_what_the_loss_takes() -> None:
    """Only a call of the loss tells: labels may be ignored, or be no classes at all."""
    x, y = torch.randn(4, 6, 3), torch.randint(3, (4, 6))
    y[:, 4:] = -100

    def of_pairs(outputs: Tensor, y: Tensor) -> Tensor:
        return torch.cdist(outputs, outputs)[y[:, None] == y[None]].mean()

    maml.MAML(nn.Linear(3, 3), loss=lambda o, y: F.cross_entropy(o.mT, y))([(x, y, x, y)])
    flat = x[:, 0], torch.tensor([7, 7, 9, 9])
    maml.MAML(nn.Linear(3, 3), loss=of_pairs)([(*flat, *flat)])
    maml.MAML(nn.Linear(3, 3), loss=lambda o, y: of_pairs(o.double(), y))([(*flat, *flat)])
    with torch.autocast("cpu", torch.bfloat16):
        maml.R2D2(nn.Linear(3, 3))([(x[0], torch.arange(6) % 3, x[1], torch.arange(6) % 3)])
    frozen = dense()
    frozen[1].requires_grad_(False)
    turns = torch.polar(torch.ones(4), x[:, 1, 0])
    maml.MAML(nn.Linear(3, 2), loss=lambda o, y: (torch.view_as_complex(o) - y).abs().mean())(
        [(flat[0], turns, flat[0], turns)]
    )
    with pytest.raises(maml.UserError, match="label 9"):
        maml.MAML(nn.Linear(3, 3))([(flat[0], y[0, :4], flat[0], torch.tensor([0, 1, 9, -100]))])
    with pytest.raises(maml.UserError, match="head="):  # what is refused leaves the module alone
        maml.ANIL(frozen)
    assert not frozen[1].weight.requires_grad


def test_tasks_may_be_of_several_forms() -> None:
    """Fields may have any order. A reader by position would silently swap support and query."""
    other = namedtuple("other", reversed(Task._fields))  # type: ignore[misc]
    named = [dict(zip(Task._fields, task, strict=True)) for task in made()]
    learner = maml.MAML(dense())
    of_numpy = [[part.numpy() for part in task] for task in made()]
    short = [(a, b.int(), c, d.int()) for a, b, c, d in made()]
    for tasks in (named, [other(**task) for task in named], of_numpy, short):
        assert learner(tasks) == learner(made())
    x, y, query, _ = made()[0]
    adapted = learner.adapt(x.numpy(), y.int().numpy())
    assert torch.equal(adapted(query.numpy()), learner.adapt(x, y)(query))
