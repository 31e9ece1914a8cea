"""A task drawn from the global generators is the same at each request, in any order of requests."""

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import maml
from datasets import contents, open_episodes, opening
from datasets.learn2learn_tasks import Tasksets
from maml.metagradient.by_task import one_by_one
from maml.worker import Worker
from tests.runs import refused, sinusoid

pytest.importorskip("learn2learn", reason="learn2learn needs Python below 3.13")

# In train, all bytes of image i of class c are 10 c + i; class 0 has label 100.
SOURCE = """
import random

import datasets
import learn2learn as l2l
import numpy as np
import torch
from torch.utils.data import TensorDataset


def tasks(split, fused=False, shuffle=True, of_class=5, classes=3):
    first = 10 * ["train", "validation", "test"].index(split)
    pixels = torch.tensor([10 * c + i for c in range(8) for i in range(6)], dtype=torch.uint8)
    images = (pixels + first // 10)[:, None, None, None].expand(-1, 1, 4, 4)
    data = l2l.data.MetaDataset(TensorDataset(images, torch.arange(48) // 6 + 100))
    of = l2l.data.transforms
    if fused:
        draw = [of.FusedNWaysKShots(data, n=classes, k=of_class)]
    else:
        draw = [of.NWays(data, classes), of.KShots(data, of_class)]
    load = [of.LoadData(data), *([of.RemapLabels(data)] if shuffle else [])]
    return l2l.data.Taskset(data, [*draw, *load], num_tasks=1000 if fused else -1)


def a(split): return tasks(split)
def b(split): return tasks(split, fused=True, shuffle=False)
def few(split): return tasks(split, of_class=4)
def many(split): return tasks(split, classes=4)
def other(split): return tasks(split).dataset

class Episodic(datasets.Episodes):
    # Tasks of one size as a batch, others as a list, remembered; task 0 is not drawn.
    def __init__(self): self.__dict__["drawn"] = {}

    def __setattr__(self, name, value): raise AttributeError(name)  # as of a frozen dataclass

    def one(self, id):
        if id not in self.drawn:
            self.drawn[id] = self.draw(1 + id % 3) if id else torch.zeros(2, 1, 4)
        y = torch.zeros(len(self.drawn[id][0]), dtype=torch.int64)
        return datasets.Task(self.drawn[id][0], y, self.drawn[id][1], y)

    def draw(self, size): return torch.rand(2, size, 4) + np.random.randn() + random.random()

    def tasks(self, ids):
        made = [self.one(id) for id in ids.tolist()]
        one_size = len({len(task.query_y) for task in made}) == 1
        return datasets.Task(*map(torch.stack, zip(*made))) if one_size else made

def sizes(split): return Episodic()
"""
REQUEST: dict[str, Any] = {"ways": 3, "shots": 2, "queries": 3, "seed": 0, "dtype": torch.float64}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "their_tasksets.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "their_tasksets", raising=False)
    return "their_tasksets"


@pytest.mark.parametrize("attribute", ["a", "b"])
def test_a_task_holds_what_learn2learn_drew(data: str, attribute: str) -> None:
    name = f"{data}:{attribute}"
    assert contents(name, **REQUEST)[:2] == ((1, 4, 4), True)
    episodes = open_episodes(name, "test", **REQUEST)
    assert isinstance(episodes, Tasksets) and episodes.one_pass == {"a": None, "b": 1000}[attribute]
    both = episodes.tasks(torch.tensor([3, 1003])).query_x
    assert torch.equal(both[0], both[1]) == (attribute == "b")  # then they come again
    taskset = sys.modules[data].tasks("train")
    at_hand = maml.episodes(taskset, ways=3, shots=2, queries=3, dtype=torch.float64)
    assert torch.equal(at_hand.task(5).query_x, at_hand.tasks([1, 5]).query_x[1])
    task = episodes.tasks(episodes.ids(0, 20))
    assert task.support_x.shape == (20, 6, 1, 4, 4) and task.query_x.dtype == torch.float64
    assert task.support_y.tolist() == [[0, 0, 1, 1, 2, 2]] * 20
    assert task.query_y.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 20
    x = torch.cat([task.support_x, task.query_x], dim=1)
    pixels = (x[:, :, 0, 0, 0] * 255).round().long()
    assert torch.equal(x[..., 3, 3][..., 0], pixels.double() / 255)
    assert all(len(set(row)) == 15 for row in pixels.tolist()), "an example is there twice"
    # All examples of a label are of one class. The classes, and their labels, vary by task.
    classes = (pixels - 2) // 10
    labels = torch.cat([task.support_y, task.query_y], dim=1)
    by_label = torch.stack([classes[labels == label].reshape(20, 5) for label in range(3)])
    assert (by_label == by_label[..., :1]).all()
    drawn = by_label[..., 0].T.tolist()
    assert all(len(set(each)) == 3 for each in drawn) and len(set(map(tuple, drawn))) > 10
    # Without RemapLabels, the classes stay in learn2learn's order.
    assert all(each == sorted(each) for each in drawn) == (attribute == "b")


@pytest.mark.parametrize("attribute", ["a", "sizes"])  # a user's own may draw, too
def test_a_task_is_the_same_alone_and_in_a_batch_and_leaves_no_trace(
    data: str, attribute: str
) -> None:
    def of(*ids: int, **more: Any) -> Any:
        opening._call_theirs.cache_clear()  # as in another process
        episodes = open_episodes(f"{data}:{attribute}", "train", **REQUEST | more)
        return list(one_by_one(episodes.tasks(torch.tensor(ids))))

    def states() -> tuple[Any, ...]:
        of_numpy, of_torch = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        return random.getstate(), of_numpy, of_torch

    *_, last = of(3, 2**40, 5)
    np.random.randn()  # numpy keeps a second one for the next call
    before = states()
    (alone,) = of(5)
    assert states() == before, "a generator moved"
    assert all(map(torch.equal, last, alone))
    assert not torch.equal(of(5, seed=1)[0].support_x, alone.support_x)


class Network(torch.nn.Linear):
    def __init__(self, inputs: tuple[int, ...], outputs: int) -> None:
        super().__init__(*inputs, outputs)


@pytest.mark.parametrize(
    "values", [{"batching": "tasks"}, {"batching": "vmap", "network": f"{__name__}:Network"}]
)
def test_no_task_is_drawn_while_draws_are_looked_for(data: str, values: dict[str, Any]) -> None:
    episodes = open_episodes(f"{data}:a", "train", **REQUEST)
    worker: Any = Worker(sinusoid(**values), torch.device("cpu"))

    def call(function: Any, *args: Any) -> Any:
        with pytest.raises(TimeoutError):
            pool.submit(episodes.tasks, torch.tensor([5])).result(timeout=0.5)
        return function(*args)

    with ThreadPoolExecutor(1) as pool:
        worker.compiled = call
        worker.share(worker.learner.meta_parameters(), torch.arange(1), worker.learner)


def test_what_does_not_fit_is_one_line(data: str) -> None:
    for attribute, words in {
        "few": "--shots 2 and --queries 3: they need 5 examples of a class, and one of ",
        "many": "have 4 classes; give --ways 4",
        "other": "not {class: images}, ImageClasses, Examples, Episodes or a Taskset of learn2",
    }.items():
        assert words in refused(contents, f"{data}:{attribute}", **REQUEST)
