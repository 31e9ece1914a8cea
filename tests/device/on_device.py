"""Tests on the pretended accelerator; `tests.device.test_device` runs them in a process with it."""

import math
import re
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import maml
from datasets.episodes import FewShotImages, ImageClasses, shuffled
from datasets.tasks import Task
from maml.config.presets import PRESETS, with_values
from maml.execution import trial
from maml.execution.prefetch import Prefetch
from maml.execution.threads import spread
from maml.kernels import library as kernels
from maml.metagradient.problem import Problem
from maml.networks.conv4 import Conv4
from maml.processes.collectives import Collectives
from maml.processes.setup import choose_device
from maml.processes.world import World
from maml.strategies.allreduce import AllReduce
from maml.strategies.local import Local
from maml.worker import Worker
from tests.device import Done, forget, launches, synchronisations
from tests.library.own_networks import Tempered, Tied, Waves, dense, made, stacked
from tests.runs import BRIEF, GLYPHS, glyphs, moved, refused, result, sinusoid, train

LEARNERS = [name for name in PRESETS if name.endswith("-glyphs-5way-1shot")]
pytestmark = pytest.mark.usefixtures("no_pictures")
CPU, ZERO, ONE = map(torch.device, ("cpu", "pretended:0", "pretended:1"))
SIZES = 5, 32, 128
"""Numbers of tasks of which a step waits as often, and launches as much."""


def near(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_device=False)


class Drawing(nn.Module):
    """An LSTM, an attending layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.drop = nn.LSTM(4, 8, batch_first=True), nn.Dropout(0.3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.layer(self.rows(x)[0])[:, -1]))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (1, 8):
        norm = nn.BatchNorm2d(8, track_running_stats=False)
        layers += [nn.Conv2d(channels, 8, 3, 2, 1), norm, nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(392, 5))


# ---- the same numbers as on the CPU


@pytest.mark.parametrize("preset", LEARNERS)
def test_learners(preset: str) -> None:
    config = with_values(PRESETS[preset], **BRIEF | GLYPHS, dtype="float64", kernels="torch")
    on_cpu, there = Worker(config, CPU), Worker(config, ONE)
    params, ids = moved(on_cpu), torch.arange(3)
    expected, found = (each.share(params, ids, each.learner) for each in (on_cpu, there))
    near(found, expected)
    assert all(gradient.device == ONE for gradient in found.gradients.values())
    near(there.evaluate(params, "test", ids), on_cpu.evaluate(params, "test", ids))


def found_by(place: torch.device, network: Callable[[], nn.Module], loss: Any) -> list[Tensor]:
    """Return gradients of a meta-learner and of a user's own outer loss, and an evaluation."""
    torch.manual_seed(0)
    net, own = network().double(), None if loss is None else loss().double()
    learner = maml.MAML(net, loss=own, inner_lr=0.1, inner_steps=2).to(place)
    tasks = Task(*stacked(made())).to(place)
    torch.manual_seed(1)
    mean = learner(tasks)
    mean.backward()
    fast = learner.eval().adapt(tasks.support_x[0], tasks.support_y[0])
    answers = fast(tasks.query_x[0])
    answers.square().sum().backward()
    found = [mean, answers, *learner.evaluate(tasks).values()]
    found += [p.grad for p in learner.parameters() if p.grad is not None]
    assert all(tensor.device == place for tensor in found)
    return [tensor.detach().cpu() for tensor in found]


@pytest.mark.parametrize(
    ("network", "loss"), [(dense, Tempered), (Tied, None), (Waves, None), (Drawing, None)]
)
def test_networks_of_a_users_own(network: Any, loss: Any) -> None:
    """Whatever the device, and whatever thread computes: dropout draws by a task's address."""
    expected = found_by(CPU, network, loss)
    in_thread: list[Tensor] = []
    thread = threading.Thread(target=lambda: in_thread.extend(found_by(ONE, network, loss)))
    thread.start()
    thread.join()
    for found in (found_by(ZERO, network, loss), found_by(ONE, network, loss), in_thread):
        near(found, expected)


@pytest.mark.parametrize("device", [ZERO, ONE])
def test_draws_leave_the_generators_as_they_were(device: torch.device) -> None:
    learner = maml.MAML(Drawing().double(), inner_lr=0.1).to(device)
    tasks = Task(*stacked(made())).to(device)
    learner(tasks)
    before = [torch.get_device_module().get_rng_state(i) for i in (0, 1)]
    learner(tasks)
    after = [torch.get_device_module().get_rng_state(i) for i in (0, 1)]
    assert all(map(torch.equal, before, after))


def test_runs_go_on_from_one_device_to_another(tmp_path: Path) -> None:
    for family, dtype, tolerance in ((glyphs, "float64", 1e-10), (sinusoid, "float32", 1e-6)):
        values = {"dtype": dtype, "iterations": 4, "eval_every": 2, "test_tasks": 4}
        config = family(**values, kernels="torch")
        folder = tmp_path / dtype
        whole = train(config, folder / "whole", device="cpu")
        for first, second in (("pretended:1", "cpu"), ("cpu", "pretended")):
            train(config, folder / first, iterations=2, device=first)
            near(train(config, folder / first, device=second)["model"], whole["model"], tolerance)
            near(result(folder / first)["loss"], result(folder / "whole")["loss"], tolerance)


def test_tasks_share_a_device_so_one_thread_computes_them() -> None:
    torch.set_num_threads(2)
    names = spread(
        nn.Linear(2, 2),
        lambda own, item: threading.current_thread().name,
        [torch.ones(1).to(ONE)] * 4,
    )
    assert {*names} == {"MainThread"}


@pytest.mark.parametrize(("size", "rotate"), [((9, 9), True), ((9, 8, 3), False)])
def test_images_that_stay_on_the_device(size: tuple[int, ...], rotate: bool) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(3, 40, *size), dtype=np.uint8)
    classes = ImageClasses.of_equal_size(pixels, np.arange(3), rotate=rotate)
    of = FewShotImages(classes, split="train", ways=2, shots=3, queries=4, seed=1)
    for there, here in ((of.on(ONE), of), (shuffled(of, 5).on(ONE), shuffled(of, 5))):
        there.tasks(torch.arange(7))
        forget()
        found, expected = there.tasks(torch.arange(7)), here.tasks(torch.arange(7))
        assert not synchronisations()
        assert all(part.device == ONE for part in found)
        assert all(map(torch.equal, expected, (part.cpu() for part in found)))


# ---- budgets


def budget(step: Callable[[], Any], waits: int) -> int:
    """Return what a third call launches, as a second does; it waits for the device so often."""
    counts = []
    for _ in range(3):
        forget()
        step()
        counts.append(launches())
        if len(counts) > 1:
            assert sum(synchronisations().values()) <= waits, synchronisations()
    assert counts[1] == counts[2]
    return counts[2]


def test_the_library_waits_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all labels. No task is computed alone, however much work it is."""
    monkeypatch.setattr(trial, "HEAVY", 0)
    episodes = maml.episodes("glyphs", "train", queries=1, device=ONE)

    def launched(n: int) -> int:
        learner = maml.MAML(convolutions(), inner_lr=0.1, inner_steps=2).to(ONE)
        optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3)

        def step() -> None:
            learner(episodes.tasks(range(n))).backward()
            optimizer.step()
            optimizer.zero_grad()

        return budget(step, 1)

    assert len({*map(launched, SIZES)}) == 1


def test_a_meta_gradient_never_waits() -> None:
    weights = {"w": torch.randn(16, 3, device=ONE, dtype=torch.float64)}

    def loss(part: str) -> Any:
        def of(params: Any, task: Any, step: int) -> Any:
            x, y = getattr(task, f"{part}_x"), getattr(task, f"{part}_y")
            value = F.cross_entropy(x.flatten(1) @ params["w"], y)
            return value, value

        return of

    def problem(params: Any) -> Problem:
        return Problem(params, loss("support"), loss("query"), lr=0.1, steps=2)

    def launched(n: int) -> int:
        tasks = Task(*stacked(made((6,) * n))).to(ONE)
        return budget(lambda: maml.meta_gradient(problem, weights, tasks), 0)

    assert len({*map(launched, SIZES)}) == 1


@pytest.mark.parametrize(
    ("strategy", "preset", "sizes"),
    [
        *(("Local", preset, (4, 9)) for preset in LEARNERS[1:]),
        *((strategy, LEARNERS[0], SIZES) for strategy in ("Local", "AllReduce")),
    ],
)
def test_the_program_waits_once_a_step(
    strategy: str,
    preset: str,
    sizes: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For the loss and the gradient's size; among processes for the signal to stop, too."""
    of = {"Local": Local, "AllReduce": AllReduce}[strategy]
    meta_step, counts = of.meta_step, list[tuple[int, int]]()

    def counted(self: Any, *given: Any) -> Any:
        counts.append((launches(), sum(synchronisations().values())))
        forget()
        return meta_step(self, *given)

    monkeypatch.setattr(of, "meta_step", counted)
    # Another thread makes tasks ahead, in any step.
    monkeypatch.setattr(Prefetch, "guess", lambda self, ids, delay: None)
    of_device = {"strategy": strategy.lower(), "device": "pretended:1", "iterations": 4}
    of_device |= {"inner_batch": 1} if "reptile" in preset else {}
    for n in sizes:
        more = {"meta_batch_size": n, "task_batch": n, "filters": 4, "log_every": 100}
        config = with_values(PRESETS[preset], **BRIEF | GLYPHS | of_device | more)
        train(config, tmp_path / str(n))
    # The counts of the step before. The first makes the optimizer's state.
    later = {count for i, count in enumerate(counts) if i % 4 > 1}
    assert len(later) == 1
    assert later.pop()[1] == (1 if strategy == "Local" else 2)


@pytest.mark.parametrize("places", [[7, 7], [7, 0]], ids=["shared", "one on the CPU"])
def test_devices_that_are_not_of_one_process_each_leave_it_to_gloo(places: list[int]) -> None:
    group = Collectives(MagicMock())
    group.of_all = lambda own: torch.tensor(places)[:, None]  # type: ignore[method-assign]
    group.meet_on(ONE)  # it would raise: there is no process group
    places[1] = 8
    with pytest.raises(ValueError, match="process group"):
        group.meet_on(ONE)


def test_a_collective_that_returns_at_once_is_waited_for() -> None:
    """Else what reads its result would wait for ever for a lost rank, unseen."""
    liveness, tensor = MagicMock(), torch.zeros(1, device=ONE)
    liveness.guard.return_value.__exit__.return_value = False
    liveness.patience.side_effect = lambda: math.inf if launched else 0.0
    group, launched = Collectives(liveness), [1]
    group._between_devices = Mock()

    def collective(tensor: Tensor, **_: Any) -> Any:
        torch.ops.pretended.fly(1)
        threading.Timer(0.2, lambda: launched and torch.ops.pretended.fly(-launched.pop())).start()
        return Done()

    began = time.monotonic()
    group.together(collective, tensor)
    assert time.monotonic() - began > 0.2
    try:
        with pytest.raises(RuntimeError, match="a rank was lost"):
            group.together(collective, tensor)
    finally:
        torch.ops.pretended.fly(-1)


# ---- manners


def test_what_is_on_another_device_is_refused_in_a_line() -> None:
    learner = maml.MAML(dense(), inner_lr=0.1).to(ONE)
    tasks = Task(*stacked(made()))
    said = r"support_x is on cpu, and the module's parameters on pretended:1: move it, as tasks\.to"
    assert re.search(said, refused(learner, tasks))
    assert re.search(said, refused(learner.evaluate, tasks))
    mixed = tasks.to(ONE)._replace(query_y=tasks.query_y)
    assert "query_y is on cpu" in refused(learner, mixed)
    assert "support_x is on cpu" in refused(learner.adapt, *(part[0] for part in tasks[:2]))
    assert "support_x is on pretended:0" in refused(learner, tasks.to(ZERO))
    assert "device 'pretended:7'" in refused(maml.episodes, "glyphs", "train", device="pretended:7")
    wrong = tasks.query_y.clone()
    wrong[1, 2] = 3
    said = "task 1: query_y has the label 3; the module tells 3 classes apart"
    assert said in refused(learner, tasks._replace(query_y=wrong).to(ONE))


def test_losses_that_are_no_numbers_are_told_in_a_later_call() -> None:
    learner = maml.MAML(dense(), inner_lr=0.1).to(ONE)
    tasks = Task(*stacked(made())).to(ONE)
    bad = tasks._replace(query_x=tasks.query_x.clone())
    bad.query_x[1] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner(bad)
    with pytest.warns(UserWarning, match="not finite in tasks 1: "):
        learner(tasks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner(bad)
        learner(tasks)


def test_a_network_that_moves_compiles_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", lambda: pytest.fail("asked for kernels of the CPU"))
    network = Conv4((1, 28, 28), 5, filters=8, pool=False)
    learner = maml.MAML(network, inner_lr=0.1).to(ONE)
    tasks = maml.episodes("glyphs", "train", queries=1, device=ONE).tasks(range(3))
    learner(tasks).backward()
    worker = Worker(glyphs(), ONE)
    worker.share(worker.learner.meta_parameters(), torch.arange(2), worker.learner)


def test_the_choice_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(name: str, local_rank: int = 0) -> torch.device:
        world = World(local_rank, 4, local_rank, 4, launched=True)
        return choose_device(with_values(PRESETS["maml-glyphs-5way-1shot"], device=name), world)

    assert [chosen("auto", i) for i in range(3)] == [ZERO, ONE, ZERO]
    assert (chosen("cpu"), chosen("pretended:1"), chosen("pretended", 1)) == (CPU, ONE, ONE)
    assert refused(chosen, "pretended:2") == "--device pretended:2: there are only 2 GPUs"
    assert "not on this machine: its accelerator is pretended" in refused(chosen, "cuda:0")
    monkeypatch.delattr(torch.get_device_module(), "manual_seed_all")  # as Apple's
    assert chosen("auto") == CPU and "it has no usable GPU" in refused(chosen, "pretended")
    maml.MAML(Drawing().double(), inner_lr=0.1)(stacked(made()))


def test_one_rule_of_exactness() -> None:
    """The program's processes repeat their results. The library leaves torch's settings alone."""
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32, cudnn.deterministic = True, False
    learner = maml.MAML(dense(), inner_lr=0.1).to(ONE)
    learner(Task(*stacked(made())).to(ONE))
    assert (cudnn.allow_tf32, cudnn.deterministic) == (True, False)
    Worker(sinusoid(), ONE, trains=False)
    assert (cudnn.allow_tf32, cudnn.deterministic) == (False, True)
