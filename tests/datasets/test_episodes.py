"""A task is a pure function of its address, and holds the images that its layout names."""

import hashlib

import numpy as np
import pytest
import torch

from datasets import DataError, Episodes, FewShotImages, ImageClasses, Task, open_episodes
from datasets.sinusoid import Sinusoid
from tests.datasets.test_batches import held_out, training
from tests.runs import same


def episodes(images, *, classes=range(30), rotate=True, **changes) -> FewShotImages:
    """Episodes of some ``classes`` of ``images [30, 20, H, W(, 3)]``."""
    options = {"ways": 5, "shots": 2, "queries": 3, "split": "train", "seed": 0} | changes
    rows = np.array(classes)
    return FewShotImages(ImageClasses.of_equal_size(images, rows, rotate=rotate), **options)


@pytest.mark.parametrize(
    ("rotate", "dtype", "channels"),
    [(True, torch.float32, 1), (False, torch.float64, 1), (True, torch.float32, 3)],
)
def test_tasks_are_what_the_layout_says_image_by_image(small_images, rotate, dtype, channels):
    rows = [3, 9, 11, 12, 20, 29]
    colours = np.stack([small_images, 255 - small_images, small_images // 2], axis=-1)
    images = colours if channels == 3 else small_images
    e = episodes(images, rotate=rotate, dtype=dtype, classes=rows)
    flat = images.reshape(600, 28, 28, channels)
    ids = torch.tensor([0, 5, 1_000_000, 2**40])
    task, layout = e.tasks(ids), e.layout(ids)
    assert task.support_x.shape == (4, 10, channels, 28, 28) and task.support_x.dtype == dtype
    assert task.query_x.shape == (4, 15, channels, 28, 28) and task.query_x.dtype == dtype
    assert task.support_y.dtype == task.query_y.dtype == torch.int64
    assert task.support_y.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]] * 4
    assert task.query_y.tolist() == [[0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3] * 4
    for b in range(len(ids)):
        for way in range(5):
            for place in range(5):
                raw = flat[layout.images[b, way, place]]
                assert layout.images[b, way, place] // 20 == rows[layout.classes[b, way]]
                expected = np.rot90(raw, layout.quarter_turns[b, way]).transpose(2, 0, 1)
                if place < 2:
                    found = task.support_x[b, way * 2 + place]
                else:
                    found = task.query_x[b, way * 3 + place - 2]
                assert torch.equal(found, torch.from_numpy(expected.copy()).to(dtype) / 255)


def test_a_division_does_not_depend_on_how_a_disk_encodes_accents():
    def division(*names):
        found = ImageClasses.in_order(np.zeros((4, 9, 9), np.uint8), [2, 2], names)
        return FewShotImages(found, split="test", ways=2, shots=1, queries=1, seed=0).division

    assert division("a", "\u00e9") == division("a", "e\u0301") == "5e61b4c352575f47"
    assert division("a", "caf\udce9") != division("a", "caf")  # not UTF-8


def few_shot() -> FewShotImages:
    return episodes(np.random.default_rng(0).integers(0, 256, (30, 20, 9, 9), dtype=np.uint8))


def waves() -> Sinusoid:
    return Sinusoid(split="test", shots=5, queries=5, seed=3)


@pytest.mark.parametrize("make", [few_shot, waves, training, held_out])
def test_a_task_is_the_same_alone_in_any_order_and_of_any_instance(make):
    some, ids = make(), torch.arange(40)
    together = some.tasks(ids)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert same(some.tasks(shuffled), Task(*(part[shuffled] for part in together)))
    for i in (0, 17, 39):
        assert same(make().tasks(ids[i : i + 1]), Task(*(part[i : i + 1] for part in together)))
    assert same(some.tasks(ids), together)
    assert all(len(part) == 0 for part in some.tasks(ids[:0]))


# Digests of the first tasks that runs trained on. If they change, no old run can be repeated.
GOLDEN = {
    ("noise", 5, 5, 15, "train"): "fa2916ad23c0dce1",
    ("glyphs", 5, 1, 5, "train"): "f84886e4ddf91cca",  # on a new machine: an inexact operation
    ("glyphs", 20, 5, 15, "test"): "6b4cbe4736b1d5a7",
    ("omniglot", 5, 1, 1, "train"): "a61cbdb782eddf5e",
    ("omniglot", 20, 5, 5, "train"): "1897c54ced720158",
}


@pytest.mark.parametrize("request_", GOLDEN, ids=lambda r: f"{r[0]}-{r[1]}way-{r[2]}shot")
def test_tasks_never_change(request_, request):
    data, ways, shots, queries, split = request_
    options = {"ways": ways, "shots": shots, "queries": queries, "split": split, "seed": 0}
    if data == "noise":
        # As many classes and images as MiniImageNet, in small.
        rng = np.random.default_rng(0)
        noise = rng.integers(0, 256, (64, 600, 2, 3, 3), dtype=np.uint8)
        e: Episodes = episodes(noise, classes=range(64), rotate=False, **options)
    else:
        # Glyphs are drawn anew: a cache would hide a change of the drawing.
        fixture = {"omniglot": "data_root", "glyphs": "empty_cache"}[data]
        root = request.getfixturevalue(fixture)
        e = open_episodes(data, data_root=root, **options)
    task = e.tasks(torch.tensor([0, 1, 2, 1000, 2**40]))
    digest = hashlib.blake2b(b"".join(part.numpy().tobytes() for part in task), digest_size=8)
    assert digest.hexdigest() == GOLDEN[request_]


def unequal(names: list[str] | None = None, **changes: int) -> FewShotImages:
    """Return classes of 4 to 40 images. An image's pixels are its row; rows 44 to 49 are unused."""
    images = np.broadcast_to(np.arange(87, dtype=np.uint8)[:, None, None], (87, 2, 2))
    first = np.array([0, 4, 50, 59, 64, 81])
    found = ImageClasses(images, first, np.array([4, 40, 9, 5, 17, 6]), False, names)
    request = {"ways": 5, "shots": 1, "queries": 3, "seed": 0} | changes
    return FewShotImages(found, split="train", **request)


def test_classes_of_unequal_size_give_all_their_images_equally_often():
    e = unequal()
    task, layout = e.tasks(torch.arange(4000)), e.layout(torch.arange(4000))
    seen = torch.cat([task.support_x.view(4000, 5, 1, 4), task.query_x.view(4000, 5, 3, 4)], dim=2)
    rows = (seen[..., 0] * 255).round().long().numpy()
    assert (rows == layout.images).all()
    assert all(len(set(images)) == 4 for images in rows.reshape(-1, 4))
    assert all(len(set(of_task)) == 5 for of_task in layout.classes)
    belongs = rows - e.first[layout.classes][..., None]
    assert (belongs >= 0).all() and (belongs < e.counts[layout.classes][..., None]).all()
    # All classes are equally frequent, whatever their size, and so are the images of a class.
    times = np.bincount(rows.ravel(), minlength=87)
    for first, count in zip(e.first, e.counts, strict=True):
        expected = 4000 * 5 / 6 * 4 / count
        chi_square = ((times[first : first + count] - expected) ** 2 / expected).sum()
        assert chi_square < count + 4 * (2 * count) ** 0.5
    assert not times[44:50].any()
    with pytest.raises(DataError, match=r"4 of train/a, 5 of train/d; [^\n]*$"):
        unequal(queries=5, names=[f"train/{letter}" for letter in "abcdef"])


def test_seed_and_split_change_every_part_of_the_layout(small_images):
    one = episodes(small_images).layout(torch.arange(50))
    assert np.bincount(one.quarter_turns.ravel(), minlength=4).min() > 40, "of 250: each way"
    for change in ({"seed": 1}, {"split": "test"}):
        other = episodes(small_images, **change).layout(torch.arange(50))
        assert all((a != b).mean() > 0.5 for a, b in zip(one, other, strict=True))
