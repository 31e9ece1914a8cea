"""``compile=``: compiled meta-gradients are those of a plain loop, whatever changes in between."""

import argparse
import copy
import dataclasses
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import maml
import tests.library.own_networks
from maml.execution import compiled
from maml.library import compiling
from tests.library import own_networks
from tests.library.own_networks import by_loop, dense, made, stacked

TASKS, STEPS, LR = made((6, 6, 6, 6)), 2, 0.1


def as_recorded(run: Any, inputs: Any) -> Any:
    """Generate no code: run the recorded operations."""
    return run


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "inductor", as_recorded)


def learner_of(network: nn.Module, **flags: Any) -> maml.MAML:
    return maml.MAML(network, inner_lr=LR, inner_steps=STEPS, **{"compile": True} | flags)


def is_quick(learner: maml.MAML) -> bool:
    return learner._compiling.quickly(learner.learner, stacked(TASKS)) is not None


def check(learner: maml.MAML, network: nn.Module, loss: Any = F.cross_entropy) -> None:
    """Check a call against a plain loop."""
    expected, gradients = by_loop(network, TASKS, STEPS, LR, loss)
    network.zero_grad()
    found = learner(stacked(TASKS))
    found.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-12)
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-11)


class Rows(nn.Module):
    """A picture's rows as a sequence."""

    def __init__(self, kind: Callable[..., nn.Module], times: int = 1, **options: Any) -> None:
        super().__init__()
        self.times = times
        self.layer = kind(4, 5, batch_first=True, **options)
        self.head = nn.Linear(5 * (1 + bool(options.get("bidirectional"))), 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.repeat(1, self.times, 1))[0][:, -1])


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": dense,
    "batch norm": lambda: dense(nn.BatchNorm1d(8)),
    "deep lstm, both ways": lambda: Rows(nn.LSTM, num_layers=2, bidirectional=True),
    "transformer": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Flatten(), nn.Linear(16, 3)
    ).double(),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_equals_a_plain_loop(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]()
    learner = learner_of(network, batching="vmap" if name == "perceptron" else "auto")
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    of_torch = nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)
    with torch.backends.mkldnn.flags(enabled=False), of_torch:  # for the plain loop
        for _ in range(3):
            check(learner, network)
            optimizer.step()
    assert is_quick(learner)
    assert learner._plans.known[True].batching == "vmap"
    assert learner.metrics["accuracy"].shape == (4,)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recording_does_not_grow_with_long_sequences(kind: Callable[..., nn.Module]) -> None:
    sizes = set()
    for times in (9, 18):
        network = Rows(kind, times, bidirectional=kind is nn.LSTM)
        learner = learner_of(network, batching="vmap")
        with torch.backends.mkldnn.flags(enabled=False):  # for the plain loop
            check(learner, network)
        assert is_quick(learner) and learner._compiling._compiled is not None
        sizes |= {entry.form.n_nodes for entry in learner._compiling._compiled._entries.values()}
    assert len(sizes) == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_code_for_long_sequences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "inductor", compiled.inductor)
    network = Rows(nn.LSTM, 9)
    learner = learner_of(network, batching="vmap")
    with torch.backends.mkldnn.flags(enabled=False):  # for the plain loop
        for _ in range(2):
            check(learner, network)
    assert is_quick(learner) and "warning" not in capsys.readouterr().err


# ---- numbers from outside ------------------------------------------------------------------------

Outside = tuple[Callable[[], Any], Callable[[float], Any]]


def in_a_global() -> Outside:
    def change(value: float) -> None:
        global _scale
        _scale = value

    return lambda: _scale, change


_scale = 1.0


def in_a_cell() -> Outside:
    scale = 1.0

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda: scale, change


def in_a_list() -> Outside:
    held = [1.0]
    return lambda: held[0], lambda value: held.__setitem__(0, value)


def in_a_namespace() -> Outside:
    args = argparse.Namespace(scale=1.0)
    return lambda: args.scale, lambda value: setattr(args, "scale", value)


def in_an_attribute() -> Outside:
    held = types.SimpleNamespace(inner={"scale": 1.0})
    return lambda: held.inner["scale"], lambda value: held.inner.update(scale=value)


def in_a_class() -> Outside:
    class Settings:
        scale = 1.0

    return lambda: Settings.scale, lambda value: setattr(Settings, "scale", value)


def in_an_array() -> Outside:
    held = np.ones(3)
    return lambda: float(held[1]), lambda value: held.__setitem__(1, value)


def in_a_tensor() -> Outside:
    held = torch.ones(())
    return lambda: held, held.fill_


def in_a_tensor_as_a_number() -> Outside:
    held = torch.ones(())
    return lambda: float(held), held.fill_


def in_a_default() -> Outside:
    def scale(of: list[float] = [1.0]) -> float:  # noqa: B006
        return of[0]

    return scale, lambda value: scale.__defaults__[0].__setitem__(0, value)  # type: ignore


def in_a_module() -> Outside:
    return lambda: own_networks.scale, lambda value: setattr(own_networks, "scale", value)


def in_a_module_of_a_package() -> Outside:
    return lambda: tests.library.own_networks.scale, in_a_module()[1]


def in_an_imported_module() -> Outside:
    def scale() -> float:
        from tests.library import own_networks as here

        return here.scale

    return scale, in_a_module()[1]


PLACES = [
    in_a_module, in_a_module_of_a_package, in_an_imported_module,
    in_a_global, in_a_cell, in_a_list, in_a_namespace, in_an_attribute, in_a_class, in_an_array,
    in_a_tensor, in_a_tensor_as_a_number, in_a_default,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_changed_number_counts_in_the_very_next_call(place: Callable[[], Outside]) -> None:
    scale, change = place()
    change(1.0)

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) * scale()

    torch.manual_seed(0)
    network = dense()
    learner = learner_of(network, loss=loss)
    check(learner, network, loss)
    check(learner, network, loss)
    assert is_quick(learner) == (place is not in_a_tensor_as_a_number)
    change(float("1"))  # another object, and the same number
    check(learner, network, loss)
    assert is_quick(learner) == (place is not in_a_tensor_as_a_number)
    for value in (1.5, 30.5, 2.0, 2.5, 3.0, 3.5):  # more values than are compiled
        change(value)
        check(learner, network, loss)
        check(learner, network, loss)


def test_a_number_in_the_module_is_of_its_creation_and_a_call_sees_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.layer = 2.0, dense()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    network = Scaled()
    learner = learner_of(network)
    check(learner, network)
    inner: Any = learner.learner.network.module
    network.scale = inner.scale = 3.0
    check(learner, network)
    check(learner, network)


def test_a_parameter_read_as_a_number_is_not_in_the_code() -> None:
    network = dense()
    parameter = next(network.parameters())

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) * (2 + parameter[0, 0].item())

    learner = learner_of(network, loss=loss, batching="vmap")
    expected = learner_of(network, loss=loss, compile=False)
    for _ in range(3):
        torch.testing.assert_close(learner(stacked(TASKS)), expected(stacked(TASKS)))
        with torch.no_grad():
            parameter.add_(0.5)


@pytest.mark.parametrize("compile", [True, False])
def test_an_index_of_no_row_is_refused_in_a_batch(compile: bool) -> None:
    network = nn.Sequential(nn.Embedding(8, 4), nn.Flatten(), nn.Linear(12, 3)).double()
    learner = learner_of(network, compile=compile, batching="vmap")
    tasks = [torch.randint(8, (4, 6, 3)), torch.arange(6).expand(4, -1) % 3] * 2
    learner(tuple(tasks))
    learner(tuple(tasks))
    for index in (8, -1):
        wrong = tasks[0].clone()
        wrong[2, 1, 1] = index
        with pytest.raises(IndexError, match="out of range"):
            learner((wrong, *tasks[1:]))


def test_a_computed_index_of_no_class_is_refused() -> None:
    learner = learner_of(dense(), loss=lambda outputs, y: F.cross_entropy(outputs, y - 1))
    x, y, *_ = stacked(TASKS)
    tasks = (x, y + 1, x, y + 1)
    learner(tasks)
    assert learner._compiling.quickly(learner.learner, tasks) is not None
    with pytest.raises((IndexError, maml.UserError)):
        learner((x, y + 1, x, (y + 1).index_fill(1, torch.tensor([2]), 0)))


# ---- what is not compiled ------------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = dense(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)
        self.kept.append(outputs.detach())
        return outputs


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = dense()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)
        return outputs if outputs.sum() > 1e6 else 2 * outputs


@pytest.mark.parametrize("kind", [Counting, Deciding, lambda: dense(nn.Dropout(0.5))])
def test_what_cannot_be_compiled_is_computed_as_before(
    kind: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    plain = kind()
    network = copy.deepcopy(plain)
    expected, found = learner_of(plain, compile=False), learner_of(network)
    for seed in range(3):
        for learner in (expected, found):
            torch.manual_seed(seed)
            learner.zero_grad()
            learner(stacked(TASKS)).backward()
        for a, b in zip(plain.parameters(), network.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    assert not is_quick(found)
    assert capsys.readouterr().err.count("computing without") == 1


def test_labels_that_are_no_classes_are_refused_as_before() -> None:
    network = dense()
    learner = learner_of(network)
    tasks = stacked(TASKS)
    learner(tasks)
    assert is_quick(learner)
    for label in (3, -1, 10**6):
        wrong = (*tasks[:3], tasks[3].clone())
        wrong[3][1, 2] = label
        with pytest.raises(maml.UserError, match=f"task 1: query_y has the label {label}"):
            learner(wrong)
    ignored = (*tasks[:3], tasks[3].clone())
    ignored[3][1, 2] = -100
    assert torch.equal(learner(ignored), learner(ignored))
    torch.testing.assert_close(learner(ignored), learner_of(network, compile=False)(ignored))
    with pytest.raises(maml.UserError, match="label -99"):
        ignored[3][1, 2] = -99
        learner(ignored)


# ---- a learner as before -------------------------------------------------------------------------


def test_other_modes_forms_and_copies() -> None:
    network = dense(nn.Dropout(0.5)).eval()
    learner = learner_of(network)
    tasks = stacked(TASKS)
    check(learner, network)
    assert is_quick(learner)
    with pytest.raises(maml.UserError, match="create_graph"):
        torch.autograd.grad(learner(tasks), [*network.parameters()], create_graph=True)
    with torch.no_grad():
        assert not learner(tasks).requires_grad
    # A list of tasks, other sizes, and tensors that are not contiguous.
    torch.testing.assert_close(learner(TASKS), learner(tasks))
    by_columns = (tasks[0].mT.contiguous().mT, *tasks[1:])
    assert torch.equal(learner(by_columns), learner(tasks))
    learner(made((7, 7)))
    fewer = made((6, 6))
    torch.testing.assert_close(
        learner(stacked(fewer)), by_loop(network, fewer, STEPS, LR)[0].detach()
    )
    # A copy has its own code, and its own parameters.
    other = copy.deepcopy(learner)
    with torch.no_grad():
        next(other.parameters()).add_(0.1)
    assert not torch.equal(other(tasks), learner(tasks))
    # In float32, and back.
    learner.float()
    assert learner(tuple(t.float() if t.is_floating_point() else t for t in tasks)).dtype == (
        torch.float32
    )
    next(learner.parameters()).requires_grad_(False)
    with pytest.raises(maml.UserError, match="was frozen after"):
        learner(tasks)


def test_flags() -> None:
    with pytest.raises(maml.UserError, match="compile 'yes': auto, True or False"):
        maml.MAML(dense(), compile="yes")  # type: ignore[arg-type]
    with pytest.raises(maml.UserError, match="compile=True computes all tasks at once"):
        maml.MAML(dense(), compile=True, batching="tasks")


def test_a_learner_can_be_saved(tmp_path: Path) -> None:
    learner = learner_of(dense())
    loss = learner(stacked(TASKS))
    torch.save(learner, tmp_path / "learner")
    again = torch.load(tmp_path / "learner", weights_only=False)
    torch.testing.assert_close(again(stacked(TASKS)), loss)


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled._Entry, "due", 0.0)
    monkeypatch.setattr(compiled, "SECONDS_A_NODE", 0.0)
    yield


@pytest.mark.usefixtures("_at_once")
def test_auto_compiles_in_the_background(capsys: pytest.CaptureFixture[str]) -> None:
    network = dense()
    learner = learner_of(network, compile="auto")
    began = time.monotonic()
    while not is_quick(learner):
        check(learner, network)
        assert time.monotonic() - began < 60
    check(learner, network)
    assert capsys.readouterr().err.count("\n") == 1


def test_several_threads_call_one_learner() -> None:
    network = dense()
    learner = learner_of(network)
    expected, found = learner(stacked(TASKS)), list[Tensor]()

    def call() -> None:
        found.extend(learner(stacked(TASKS)).detach() for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200 and all(torch.equal(loss, expected) for loss in found)


# ---- maml.meta_gradient --------------------------------------------------------------------------


def test_a_problem_of_one_s_own_is_compiled_once_for_what_it_reaches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each call makes the functions anew. What they reach decides, whatever it is."""
    recorded = list[Any]()

    def counting(run: Any, inputs: Any) -> Any:
        recorded.append(run)
        return run

    monkeypatch.setattr("maml.library.gradient.inductor", counting)
    network = dense()
    params = dict(network.named_parameters())
    settings: dict[str, Any] = {"scale": 1.0}
    support_x, support_y, query_x, query_y = stacked(TASKS)
    tasks = {"support": (support_x, support_y), "query": (query_x, query_y)}

    def called(lr: float, weight: Tensor | None = None, **how: Any) -> list[Tensor]:
        def loss(params: Any, examples: Any) -> tuple[Tensor, Tensor]:
            outputs = torch.func.functional_call(network, params, examples[0])
            value = settings["scale"] * F.cross_entropy(outputs, examples[1])
            return value if weight is None else value * weight, outputs

        def state(params: Any) -> maml.Problem:
            return maml.Problem(
                start=params,
                support=lambda params, task, step: loss(params, task["support"]),
                query=lambda params, task, step: loss(params, task["query"]),
                steps=2,
                lr=lr,
            )

        found = maml.meta_gradient(state, params, tasks, **how)
        return [found.losses, found.outputs, *found.gradients.values()]

    def check(lr: float, weight: Tensor | None = None) -> None:
        found, plain = (called(lr, weight, compile=how) for how in (True, False))
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)

    for lr, scale, n in ((0.1, 1.0, 1), (0.1, 1.0, 1), (0.2, 1.0, 2), (0.1, 3.0, 3), (0.2, 1.0, 3)):
        settings["scale"] = scale
        check(lr)
        assert len(recorded) == n
    with torch.no_grad():
        network[-1].weight += 1.0
    check(0.1)
    assert len(recorded) == 3
    for step in range(4):
        check(0.1, torch.tensor(1.0 + step, dtype=torch.float64))
    lines = capsys.readouterr().err.splitlines()
    assert sum("other numbers or objects in more than 4 calls" in line for line in lines) == 1
    tasks = pytree.tree_map(lambda tensor: tensor[:1], tasks)
    for n, way in ((5, "auto"), (5, "auto"), (6, "reverse"), (6, "reverse")):
        found, plain = (called(0.1, way=way, compile=how) for how in (True, False))
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)
        assert len(recorded) == n
    with pytest.raises(ValueError, match="leave out batching"):
        called(0.1, batching="tasks", compile=True)


def test_which_value_is_where_and_what_torch_reads_as_a_number_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("maml.library.gradient.inductor", as_recorded)
    network, delta = dense(), torch.tensor(0.3, dtype=torch.float64)
    tasks, scales = stacked(TASKS), (3.0, 5.0)

    def losses(factors: tuple[float, ...], **how: Any) -> Tensor:
        base = maml.Problem(dict(network.named_parameters()), steps=1, lr=0.1, **both(factors))

        def state(params: Any) -> maml.Problem:
            return dataclasses.replace(base, start=params)

        return maml.meta_gradient(state, base.start, tasks, **how).losses

    def both(factors: tuple[float, ...]) -> dict[str, Any]:
        def loss(params: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            outputs = torch.func.functional_call(network, params, (x,))
            hot = F.one_hot(y, 3).to(outputs) * factors[0] + factors[1] * 0.1 + factors[2]
            return F.huber_loss(outputs, hot, delta=delta), outputs  # type: ignore[arg-type]

        return {
            "support": lambda params, task, step: loss(params, task[0], task[1]),
            "query": lambda params, task, step: loss(params, task[2], task[3]),
        }

    a, b = scales
    for factors, number in (((a, b, a), 0.3), ((a, b, b), 0.3), ((b, a, a), 0.3), ((b, a, a), 2.0)):
        delta.data.fill_(number)
        found, plain = (losses(factors, compile=how) for how in (True, False))
        torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)
