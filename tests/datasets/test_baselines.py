"""The nearest-neighbour baseline against a loop that cannot be wrong."""

from __future__ import annotations

import numpy as np
import torch

from datasets import FewShotImages
from datasets.baselines import nearest_neighbour_accuracy


def episodes(images, **changes) -> FewShotImages:
    options = {"split": "test", "ways": 4, "shots": 3, "queries": 2, "seed": 0, "rotate": False}
    options.update(changes)
    return FewShotImages(images=images, classes=np.arange(len(images)), **options)


def test_agrees_with_a_plain_loop():
    rng = np.random.default_rng(0)
    # A class is a noisy template, so that accuracy is neither chance nor perfect.
    images = (rng.integers(0, 60, (9, 1, 6, 6)) + rng.integers(0, 190, (9, 8, 6, 6))).astype(
        np.uint8
    )
    e = episodes(images)
    ids = torch.arange(70)
    task = e.tasks(ids)
    expected = []
    for b in range(70):
        right = 0
        for query, label in zip(task.query_x[b], task.query_y[b], strict=True):
            distances = [float(((query - s).double() ** 2).sum()) for s in task.support_x[b]]
            right += int(task.support_y[b, int(np.argmin(distances))] == label)
        expected.append(right / 8)
    found = nearest_neighbour_accuracy(e, ids, batch=32)
    assert found.shape == (70,)
    assert found.tolist() == expected
    assert 0.3 < found.mean() < 0.95


def test_perfect_on_identical_drawings_and_chance_on_noise():
    rng = np.random.default_rng(0)
    same = np.repeat(rng.integers(0, 256, (9, 1, 6, 6), dtype=np.uint8), 8, axis=1)
    assert nearest_neighbour_accuracy(episodes(same), torch.arange(20)).tolist() == [1.0] * 20
    noise = rng.integers(0, 256, (40, 20, 6, 6), dtype=np.uint8)
    chance = nearest_neighbour_accuracy(episodes(noise, shots=1), torch.arange(1000)).mean()
    assert abs(chance - 0.25) < 0.04
    assert nearest_neighbour_accuracy(episodes(noise), torch.arange(0)).shape == (0,)
