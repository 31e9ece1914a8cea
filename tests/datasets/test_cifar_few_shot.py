"""CIFAR-FS and FC100 have the published classes, and all 600 images of each."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import cifar_few_shot, open_episodes
from datasets.cifar_few_shot import CLASSES, labels
from datasets.episodes import SPLITS
from tests.datasets.tiny_torchvision import Tiny

# SHA-256 of the sorted names, joined by spaces, as torchmeta 1.8.0 has them; the files of CIFAR-FS
# list the same.
PUBLISHED = {
    ("cifarfs", "train"): "9c1c5737bdab74307285ebc33ef9d9c7c5c6a05c2f948477f05d018f433fa031",
    ("cifarfs", "validation"): "a4d5a75dcb3fc7d1430824e4fe2b16719fc8ca0a4d043eafda1e8034fb6f8b94",
    ("cifarfs", "test"): "fa4f899ce87368b0abee8cd0c4f525244d460dc4b4462eea60d3421401521104",
    ("fc100", "train"): "d8d596ceda4a038e659045cbb9e29bc21b2a12911638f5a2d8b49d901569d203",
    ("fc100", "validation"): "3012221eb4c255f32eb8c5f2dacc8fb8655c0a47eb732b47c2f6a8cfa9c188cb",
    ("fc100", "test"): "aad1cace7c8ffa5958fdbe0700310f241fdd8ad62f8732063dfce95361048909",
}


@pytest.mark.parametrize("name", ["cifarfs", "fc100"])
def test_the_classes_are_the_published_ones(name: str) -> None:
    for split in SPLITS:
        names = " ".join(CLASSES[label] for label in labels(name, split))
        assert hashlib.sha256(names.encode()).hexdigest() == PUBLISHED[name, split]
    assert sorted(CLASSES) == CLASSES, "CIFAR-100 numbers them so"
    everything = np.concatenate([labels(name, split) for split in SPLITS])
    assert sorted(everything.tolist()) == list(range(100))


def test_images_are_all_there_and_a_task_has_those_of_its_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    """Of a miniature with three images of each class."""
    tiny = Tiny("cifar100", monkeypatch, {"train": 200, "test": 100})
    tiny.write(tmp_path)
    found = cifar_few_shot.open_images(tmp_path)
    train, test = tiny.images["train"], tiny.images["test"]
    assert (found == np.stack([train[:100], train[100:], test], axis=1)).all()
    # Both data sets take the same file, which needs the archive no more.
    shutil.rmtree(tmp_path / tiny.name)
    request = {"data_root": tmp_path, "ways": 5, "shots": 1, "queries": 2, "seed": 0}
    for name, split in PUBLISHED:
        episodes = open_episodes(name, split, **request)
        task = episodes.tasks(episodes.ids(0, 2))
        assert task.query_x.shape == (2, 10, 3, 32, 32)
        pixels = (task.query_x * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
        for one, way in zip(pixels.reshape(-1, 32, 32, 3), task.query_y.ravel(), strict=True):
            ((label, _),) = np.argwhere((found == one).all(axis=(2, 3, 4)))
            assert label in labels(name, split) and way < 5
