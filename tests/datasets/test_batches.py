"""A mini-batch is a pure function of its address, and an epoch has no example twice."""

import numpy as np
import pytest
import torch

from datasets import DataError, ImageClasses
from datasets.batches import PLACES, Batches, Examples, divide

N, E = 53, 8
PER_EPOCH = N // E


def examples(first: int = 0, n: int = N) -> Examples:
    """Return rows ``first``, ``first + 2``, …: an image's pixels and its label are its row."""
    images = np.broadcast_to(np.arange(200, dtype=np.uint8)[:, None, None], (200, 4, 5))
    rows = first + 2 * np.arange(n, dtype=np.int64)
    return Examples(images, rows, rows.copy())


def training(**changes) -> Batches:
    return Batches(examples(), **{"split": "train", "batch_size": E, "seed": 0, **changes})


def held_out(**changes) -> Batches:
    options = {"split": "test", "batch_size": E, "seed": 0, "reference": examples(), **changes}
    return Batches(examples(first=1, n=20), **options)


def test_a_training_task_is_a_mini_batch_with_an_empty_support_set():
    task = training(dtype=torch.float64).tasks(torch.tensor([0, 3, 10**12]))
    assert task.query_x.shape == (3, E, 1, 4, 5) and task.query_x.dtype == torch.float64
    assert task.query_y.shape == (3, E) and task.query_y.dtype == torch.int64
    assert task.support_x.shape == (3, 0, 1, 4, 5) and task.support_x.dtype == torch.float64
    assert task.support_y.shape == (3, 0) and task.support_y.dtype == torch.int64
    # Each image with its own label.
    exact = task.query_y.double()[..., None, None, None].expand_as(task.query_x) / 255
    assert torch.equal(task.query_x, exact)


def test_an_epoch_has_no_example_twice():
    batches, epoch = training(), 1000
    assert batches.one_pass == PER_EPOCH == 6
    drawn = batches.tasks(epoch * PER_EPOCH + torch.arange(PER_EPOCH)).query_y
    assert len(set(drawn.flatten().tolist())) == PER_EPOCH * E
    assert set(drawn.flatten().tolist()) <= set(examples().rows.tolist())
    # Each epoch leaves out other examples.
    many = batches.tasks(torch.arange(50 * PER_EPOCH)).query_y
    assert set(many.flatten().tolist()) == set(examples().rows.tolist())


def test_held_out_examples_come_in_one_order_whatever_the_seed():
    """The support set of each is a batch of training examples, which depends on the seed."""
    batches = held_out()
    assert batches.one_pass == 3  # 20 examples in batches of 8
    tasks, other = batches.tasks(torch.arange(8)), held_out(seed=9).tasks(torch.arange(8))
    drawn = tasks.query_y.flatten().tolist()
    own = examples(first=1, n=20).rows.tolist()
    assert sorted(drawn[:20]) == own
    assert drawn[:20] != own  # files are often in the order of classes
    assert drawn[20:40] == drawn[:20]
    assert other.query_y.flatten().tolist() == drawn
    support = tasks.support_y[:PER_EPOCH].flatten().tolist()
    assert set(support) <= set(examples().rows.tolist()) and len(set(support)) == len(support)
    assert not torch.equal(other.support_y, tasks.support_y)
    assert not torch.equal(training().tasks(torch.arange(8)).query_y, tasks.support_y)


def test_too_few_training_examples_name_the_flag():
    with pytest.raises(DataError, match="--batch-size 8: the train split has only 5"):
        held_out(reference=examples(n=5))


# ---- drawings as ordinary classification ------------------------------------------------------


def test_drawings_of_a_class_are_divided_without_overlap(small_images):
    classes = np.array([4, 2, 9, 11])
    few_shot = ImageClasses.of_equal_size(small_images, classes, rotate=True)
    found = {split: divide(few_shot, split, 3) for split in PLACES}
    assert {split: len(some.rows) for split, some in found.items()} == {
        "train": 42, "validation": 6, "test": 12,
    }  # fmt: skip
    seen = np.concatenate([some.rows for some in found.values()])
    assert len(np.unique(seen)) == len(seen) == 3 * 20
    for some in found.values():
        assert (classes[some.labels] == some.rows // 20).all()
        drawings = small_images[some.rows // 20, some.rows % 20]
        assert (some.images[some.rows] == drawings).all()
