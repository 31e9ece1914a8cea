"""torchvision's sets are downloaded, checked and decoded once; a missing set is one line."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import open_episodes
from datasets.episodes import SPLITS
from datasets.torchvision_sets import (
    CLASSES,
    SOURCES,
    labels,
    open_examples,
    open_images,
    open_part,
    split_rows,
)
from tests.datasets.tiny_torchvision import Tiny, Web
from tests.runs import refused


def test_validation_is_drawn_once_and_for_all() -> None:
    """If the draw changed, old runs would have trained on some of the new validation images."""
    rows = split_rows("mnist", "validation", 60_000)
    assert len(rows) == 6000
    assert rows[:5].tolist() == [4, 8, 12, 16, 23]
    assert len(np.intersect1d(rows, split_rows("fashion-mnist", "validation", 60_000))) < 1000
    # Uniform: half of the rows are of the first half, to four standard deviations.
    assert abs((rows < 30_000).sum() - 3000) < 4 * (6000 / 4 * 0.9) ** 0.5


@pytest.mark.parametrize("name", SOURCES)
def test_from_download_to_splits(
    name: str, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images and labels are the published ones; files are downloaded, and decoded, only once."""
    tiny = Tiny(name, monkeypatch)
    web = Web(tiny.files, monkeypatch)
    rows = {}
    for split in ("train", "validation", "test"):
        part = "test" if split == "test" else "train"
        some = open_examples(split, name=tiny.name, ways=tiny.source.classes, data_root=tmp_path)
        assert some.images.dtype == np.uint8
        assert (some.images[some.rows] == tiny.images[part][some.rows]).all()
        assert (some.labels == tiny.labels[part][some.rows]).all()
        rows[split] = some.rows.tolist()
    assert [len(some) for some in rows.values()] == [54, 6, 20]
    assert sorted(rows["train"] + rows["validation"]) == list(range(60))
    for name, content in tiny.files.items():
        assert (tmp_path / tiny.name / name).read_bytes() == content
    web.asked.clear()
    with monkeypatch.context() as patch:
        patch.setenv("MAML_CACHE", str(tmp_path / "another"))
        open_part(tiny.name, "train", tmp_path)
    assert web.asked == []
    shutil.rmtree(tmp_path / tiny.name)
    images, of_class = open_part(tiny.name, "train", tmp_path)
    assert (images == tiny.images["train"]).all() and (of_class == tiny.labels["train"]).all()
    assert web.asked == []


@pytest.mark.parametrize("name", ["mnist", "cifar10", "svhn"])
def test_missing_and_damaged_data_names_the_folder_and_the_ways_out(
    name: str, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Tiny(name, monkeypatch)
    tiny.write(tmp_path)
    name = next(name for name in tiny.files if "t10k" not in name and "test" not in name)
    path = tmp_path / tiny.name / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    # Damaged data without a network; no data; downloads that differ from the published files.
    another = {name: content[:-9] + b"elsewhere" for name, content in tiny.files.items()}
    for data_root, files in ((tmp_path, {}), (tmp_path / "a", {}), (tmp_path / "b", another)):
        Web(files, monkeypatch)
        asked = {"name": tiny.name, "ways": tiny.source.classes, "data_root": data_root}
        message = refused(open_examples, "train", **asked)
        assert message.startswith(f"{data_root / tiny.name}: {tiny.name} is missing or damaged")
        for words in ("was not downloaded (", "--data-root", "$MAML_DATA", "*-glyphs-*"):
            assert words in message
    assert list(empty_cache.rglob("*.npy")) == []


# ---- CIFAR-FS and FC100 -----------------------------------------------------------------------

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
    found = open_images(tmp_path)
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
