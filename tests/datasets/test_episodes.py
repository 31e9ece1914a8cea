"""Tasks are pure functions of their address, and are what their layout says."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from datasets import DataError, FewShotImages, Task
from datasets.sinusoid import Sinusoid


class Untouchable:
    """Images that may be measured, not read."""

    shape = (30, 20, 28, 28)

    def __getitem__(self, index):
        raise AssertionError("an image was read")


def episodes(images, **changes) -> FewShotImages:
    options = {"ways": 5, "shots": 2, "queries": 3, "split": "train", "seed": 0, "rotate": True}
    return FewShotImages(images=images, **{"classes": np.arange(30), **options, **changes})


def same(a: Task, b: Task) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_ids_are_consecutive_and_never_repeat(small_images):
    e = episodes(small_images)
    ids = torch.cat([e.ids(iteration, 7) for iteration in range(50)])
    assert ids.dtype == torch.int64
    assert torch.equal(ids, torch.arange(350))


def test_shapes_types_and_class_major_labels(small_images):
    task = episodes(small_images).tasks(torch.arange(4))
    assert task.support_x.shape == (4, 10, 1, 28, 28)
    assert task.query_x.shape == (4, 15, 1, 28, 28)
    assert task.support_x.dtype == task.query_x.dtype == torch.float32
    assert task.support_y.dtype == task.query_y.dtype == torch.int64
    assert task.support_y.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]] * 4
    assert task.query_y.tolist() == [[0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3] * 4
    assert task.support_x.min() >= 0 and task.support_x.max() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rotate", [True, False])
def test_tasks_are_what_the_layout_says_image_by_image(small_images, rotate, dtype):
    e = episodes(small_images, rotate=rotate, dtype=dtype, classes=np.array([3, 9, 11, 12, 20, 29]))
    ids = torch.tensor([0, 5, 1_000_000, 2**40])
    task, layout = e.tasks(ids), e.layout(ids)
    for b in range(len(ids)):
        for way in range(5):
            for place in range(5):
                raw = small_images[layout.classes[b, way], layout.drawings[b, way, place]]
                expected = np.rot90(raw, layout.quarter_turns[b, way])
                if place < 2:
                    found = task.support_x[b, way * 2 + place]
                else:
                    found = task.query_x[b, way * 3 + place - 2]
                assert torch.equal(found[0], torch.from_numpy(expected.copy()).to(dtype) / 255)


def test_a_task_is_the_same_alone_or_in_any_batch(small_images):
    e = episodes(small_images)
    ids = torch.arange(40)
    together = e.tasks(ids)
    shuffled = ids.flip(0)
    assert same(Task(*(part.flip(0) for part in e.tasks(shuffled))), together)
    for i in (0, 17, 39):
        assert same(e.tasks(ids[i : i + 1]), Task(*(part[i : i + 1] for part in together)))
    # Asking twice, after other requests, and of another instance, changes nothing either.
    assert same(episodes(small_images).tasks(ids), together)


def test_a_task_is_the_same_in_another_process_with_another_hash_seed(run_python):
    code = """
import hashlib, numpy as np, torch
from datasets import FewShotImages
from datasets.sinusoid import Sinusoid
images = np.arange(30 * 20 * 28 * 28).astype(np.uint8).reshape(30, 20, 28, 28)
ids = torch.tensor([0, 3, 77, 2**33])
a = FewShotImages(images=images, classes=np.arange(30), split="test", ways=5, shots=1, queries=2,
                  seed=5, rotate=True).tasks(ids)
b = Sinusoid(split="test", shots=3, queries=4, seed=5).tasks(ids)
print(hashlib.sha256(b"".join(p.numpy().tobytes() for p in (*a, *b))).hexdigest())
"""
    images = np.arange(30 * 20 * 28 * 28).astype(np.uint8).reshape(30, 20, 28, 28)
    ids = torch.tensor([0, 3, 77, 2**33])
    here = episodes(images, split="test", shots=1, queries=2, seed=5).tasks(ids)
    wave = Sinusoid(split="test", shots=3, queries=4, seed=5).tasks(ids)
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in (*here, *wave))).hexdigest()
    # Strings hash differently there than here, whatever seed this process has.
    child = run_python(code, PYTHONHASHSEED="4242")
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert out.strip() == digest


def test_ids_and_layout_touch_no_image():
    e = episodes(Untouchable())
    layout = e.layout(e.ids(3, 8))
    assert layout.drawings.shape == (8, 5, 5)
    with pytest.raises(AssertionError, match="an image was read"):
        e.tasks(e.ids(0, 1))


def test_classes_and_drawings_are_distinct_and_belong_to_the_split():
    rows = np.array([1, 4, 6, 7, 13, 22, 28])
    layout = episodes(Untouchable(), classes=rows, shots=10, queries=10).layout(torch.arange(500))
    assert set(layout.classes.ravel()) == set(rows)
    assert all(len(set(task)) == 5 for task in layout.classes)
    # With 10 + 10 of 20, each class shows every drawing once: support and query share none.
    assert (np.sort(layout.drawings, axis=-1) == np.arange(20)).all()


def test_support_and_query_never_share_a_drawing():
    layout = episodes(Untouchable(), shots=5, queries=9).layout(torch.arange(300))
    support, query = layout.drawings[..., :5], layout.drawings[..., 5:]
    assert not (support[..., :, None] == query[..., None, :]).any()


def test_every_class_gets_every_label_and_every_rotation_equally_often():
    layout = episodes(Untouchable()).layout(torch.arange(6000))
    counts = np.zeros((30, 5, 4))
    np.add.at(counts, (layout.classes, np.arange(5), layout.quarter_turns), 1)
    expected = 6000 * 5 / counts.size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 599 - 1 - 4 degrees of freedom or so; a standard deviation is 35.
    assert 480 < chi_square < 720


def test_drawings_of_the_classes_of_a_task_are_independent():
    drawings = episodes(Untouchable(), shots=1, queries=1).layout(torch.arange(4000)).drawings
    equal = (drawings[:, 0, 0] == drawings[:, 1, 0]).mean()
    assert abs(equal - 1 / 20) < 0.015


def test_rotation_off_means_no_turn():
    layout = episodes(Untouchable(), rotate=False).layout(torch.arange(100))
    assert not layout.quarter_turns.any()


@pytest.mark.parametrize("change", [{"seed": 1}, {"split": "test"}])
def test_seed_and_split_change_every_part_of_the_layout(change):
    one = episodes(Untouchable()).layout(torch.arange(50))
    other = episodes(Untouchable(), **change).layout(torch.arange(50))
    for a, b in zip(one, other, strict=True):
        assert (a != b).mean() > 0.5


def test_more_queries_keep_the_classes_and_rotations():
    one = episodes(Untouchable(), queries=1).layout(torch.arange(50))
    other = episodes(Untouchable(), queries=15).layout(torch.arange(50))
    assert (one.classes == other.classes).all()
    assert (one.quarter_turns == other.quarter_turns).all()


def test_making_tasks_does_not_write_to_the_images(small_images):
    before = small_images.copy()
    small = small_images.view()
    small.flags.writeable = False
    task = episodes(small).tasks(torch.arange(10))
    task.support_x.zero_()
    assert (small_images == before).all()


def test_colour_images_become_channels_first():
    images = np.random.default_rng(1).integers(0, 256, (6, 4, 8, 8, 3), dtype=np.uint8)
    e = episodes(images, classes=np.arange(6), shots=1, queries=1)
    task, layout = e.tasks(torch.arange(9)), e.layout(torch.arange(9))
    assert task.query_x.shape == (9, 5, 3, 8, 8)
    raw = images[layout.classes[4, 2], layout.drawings[4, 2, 1]]
    expected = np.rot90(raw, layout.quarter_turns[4, 2]).transpose(2, 0, 1)
    assert torch.equal(task.query_x[4, 2], torch.from_numpy(expected.copy()).float() / 255)


def test_a_task_is_a_pytree_that_vmap_splits(small_images):
    task = episodes(small_images).tasks(torch.arange(3))

    def mean(one: Task):
        assert one.support_x.shape == (10, 1, 28, 28)
        return one.support_x.mean()

    assert torch.func.vmap(mean)(task).shape == (3,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ways": 31}, ["--ways 31", "train", "30"]),
        ({"ways": 0}, ["--ways 0"]),
        ({"shots": 0}, ["--shots 0"]),
        ({"queries": 0}, ["--queries 0"]),
        ({"shots": 15, "queries": 6}, ["--shots 15", "--queries 6", "21", "20"]),
    ],
)
def test_impossible_requests_name_the_flag(change, words):
    with pytest.raises(DataError) as caught:
        episodes(Untouchable(), **change)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)


def test_the_largest_possible_request_is_served(small_images):
    task = episodes(small_images, ways=30, shots=10, queries=10).tasks(torch.arange(2))
    assert task.support_x.shape == (2, 300, 1, 28, 28)
