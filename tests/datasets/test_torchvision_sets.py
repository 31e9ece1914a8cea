"""torchvision's sets are found, checked, downloaded and decoded once, or missed in one line."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from datasets import DataError
from datasets.torchvision_sets import SOURCES, open_examples, open_part, split_rows
from tests.datasets.tiny_torchvision import Tiny, Web


@pytest.fixture
def tiny(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> Tiny:
    """A miniature that counts as published; nothing is on disk yet."""
    made = Tiny(request.param)
    made.install(monkeypatch)
    return made


def test_validation_is_drawn_once_and_for_all() -> None:
    """Of the data set, not of the run: a change would let old runs have seen the new validation."""
    rows = split_rows("mnist", "validation", 60_000)
    assert len(rows) == 6000
    assert rows[:5].tolist() == [4, 8, 12, 16, 23]
    assert len(np.intersect1d(rows, split_rows("fashion-mnist", "validation", 60_000))) < 1000
    # Uniform: as many of the first half as of the second, to four deviations.
    assert abs((rows < 30_000).sum() - 3000) < 4 * (6000 / 4 * 0.9) ** 0.5


@pytest.mark.parametrize("tiny", SOURCES, indirect=True)
def test_from_download_to_splits(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the published images and labels; what is there is not fetched, nor decoded, again."""
    web = Web(tiny.files)
    web.install(monkeypatch)
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


@pytest.mark.parametrize("tiny", ["mnist", "cifar10", "svhn"], indirect=True)
def test_missing_and_damaged_data_names_the_folder_and_the_ways_out(
    tiny: Tiny, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write(tmp_path)
    name = next(name for name in tiny.files if "t10k" not in name and "test" not in name)
    path = tmp_path / tiny.name / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    # Damaged, and no network; nothing there; another file than the published one.
    another = Web({name: content[:-9] + b"elsewhere" for name, content in tiny.files.items()})
    for data_root, web in ((tmp_path, Web()), (tmp_path / "a", Web()), (tmp_path / "b", another)):
        web.install(monkeypatch)
        with pytest.raises(DataError) as caught:
            open_examples("train", name=tiny.name, ways=tiny.source.classes, data_root=data_root)
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith(f"{data_root / tiny.name}: {tiny.name} is missing or damaged")
        for words in ("was not downloaded (", "--data-root", "$MAML_DATA", "*-glyphs-*"):
            assert words in message
    assert list(empty_cache.rglob("*.npy")) == []
