"""Prefetched tasks are the right tasks, and wrong guesses cost little."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from datasets.tasks import Task
from maml.execution.prefetch import MISSES, Prefetch, _thread
from tests.runs import glyphs, same, train


class Made:
    """A maker of tasks that records their ids and its threads."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.threads: list[int] = []

    def __call__(self, ids: Tensor) -> Task:
        self.ids.append(ids.tolist())
        self.threads.append(threading.get_ident())
        return Task(*(ids.float() + i for i in range(4)))


def test_within_a_call_one_batch_ahead() -> None:
    made = Made()
    batches = torch.arange(10).split(4)
    for number, tasks in enumerate(Prefetch(made).tasks(batches)):
        assert torch.equal(tasks.support_x, batches[number].float())
    assert sorted(made.ids) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert made.threads[0] == threading.get_ident()
    assert threading.get_ident() not in made.threads[1:]
    assert list(Prefetch(made).tasks([])) == []


def test_wrong_guesses_end() -> None:
    """Calls that no guess fits get their own tasks; after a few misses nothing is prefetched."""
    made = Made()
    ahead = Prefetch(made)
    for step in range(20):
        ids = torch.tensor([100 * step])
        (tasks,) = ahead.tasks([ids])
        assert torch.equal(tasks.support_x, ids.float())
        ahead.guess(ids + 1)
    _thread().submit(int).result()
    in_vain = [ids for ids in made.ids if ids[0] % 100]
    assert len(in_vain) == MISSES


@pytest.mark.usefixtures("no_pictures")
def test_training_is_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's guesses are right, and it ends with the parameters of a run without guesses."""
    config = glyphs(iterations=4, task_batch=2)
    hits = []
    take = Prefetch._take

    def counted(ahead: Prefetch, ids: Tensor) -> Any:
        hits.append(ahead._guess is not None and torch.equal(ahead._guess[0], ids))
        return take(ahead, ids)

    monkeypatch.setattr(Prefetch, "_take", counted)
    ahead = train(config, tmp_path / "ahead")
    assert hits[:4] == [False, True, True, True]
    monkeypatch.setattr(Prefetch, "guess", lambda *_: None)
    assert same(train(config, tmp_path / "never")["model"], ahead["model"])
