"""torchvision's sets are downloaded, checked and decoded once; a missing set is one line."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from datasets.torchvision_sets import SOURCES, open_examples, open_part, split_rows
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
    images, labels = open_part(tiny.name, "train", tmp_path)
    assert (images == tiny.images["train"]).all() and (labels == tiny.labels["train"]).all()
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
