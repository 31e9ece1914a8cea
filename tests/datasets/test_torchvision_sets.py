"""torchvision's sets are found, checked, downloaded and decoded once, or missed in one line."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from datasets import DataError, open_episodes
from datasets.torchvision_sets import SOURCES, open_examples, open_part, split_rows
from tests.datasets.tiny_torchvision import Tiny, Web

NAMES = list(SOURCES)


@pytest.fixture
def tiny(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> Tiny:
    """A miniature that counts as published; no network, and nothing on disk yet."""
    made = Tiny(request.param)
    made.install(monkeypatch)
    Web().install(monkeypatch)
    return made


every = pytest.mark.parametrize("tiny", NAMES, indirect=True)
kinds = pytest.mark.parametrize("tiny", ["mnist", "cifar10", "svhn"], indirect=True)


def refused(tiny: Tiny, data_root: Path, split: str = "train") -> str:
    with pytest.raises(DataError) as caught:
        open_examples(split, name=tiny.name, ways=tiny.source.classes, data_root=data_root)
    message = str(caught.value)
    assert "\n" not in message
    return message


@every
def test_splits_have_the_published_images_and_labels(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write(tmp_path)
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


def test_validation_is_drawn_once_and_for_all() -> None:
    """Of the data set, not of the run: a change would let old runs have seen the new validation."""
    rows = split_rows("mnist", "validation", 60_000)
    assert len(rows) == 6000
    assert rows[:5].tolist() == [4, 8, 12, 16, 23]
    assert len(np.intersect1d(rows, split_rows("fashion-mnist", "validation", 60_000))) < 1000
    # Uniform: as many of the first half as of the second, to four deviations.
    assert abs((rows < 30_000).sum() - 3000) < 4 * (6000 / 4 * 0.9) ** 0.5


@every
def test_downloads_what_is_missing_and_checks_it(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = Web(tiny.files)
    web.install(monkeypatch)
    images, _ = open_part(tiny.name, "train", tmp_path / "new")
    assert (images == tiny.images["train"]).all()
    folder = tmp_path / "new" / tiny.name
    assert web.asked
    for name, content in tiny.files.items():
        if (folder / name).exists():  # of files for each part, only those of this one
            assert (folder / name).read_bytes() == content
    # What is there is not asked for again, though the cache is gone.
    monkeypatch.setenv("MAML_CACHE", str(tmp_path / "another"))
    web.asked.clear()
    open_part(tiny.name, "train", tmp_path / "new")
    assert web.asked == []


@kinds
def test_a_download_that_is_not_the_published_file_is_refused(
    tiny: Tiny, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Web({name: content[:-9] + b"elsewhere" for name, content in tiny.files.items()}).install(
        monkeypatch
    )
    message = refused(tiny, tmp_path)
    assert "missing or damaged there" in message and str(tmp_path / tiny.name) in message
    assert list(empty_cache.rglob("*.npy")) == []


@kinds
def test_missing_and_damaged_data_names_the_folder_and_the_ways_out(
    tiny: Tiny, tmp_path: Path, empty_cache: Path
) -> None:
    tiny.write(tmp_path)
    name = next(name for name in tiny.files if "t10k" not in name and "test" not in name)
    path = tmp_path / tiny.name / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for data_root in (tmp_path, tmp_path / "nowhere"):
        message = refused(tiny, data_root)
        assert message.startswith(f"{data_root / tiny.name}: {tiny.name} is missing or damaged")
        for words in ("was not downloaded (", "--data-root", "$MAML_DATA", "*-glyphs-*"):
            assert words in message
    assert list(empty_cache.rglob("*.npy")) == []


@kinds
def test_what_was_decoded_needs_the_files_no_more(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    open_part(tiny.name, "train", tmp_path)
    shutil.rmtree(tmp_path / tiny.name)
    images, labels = open_part(tiny.name, "train", tmp_path)
    assert (images == tiny.images["train"]).all() and (labels == tiny.labels["train"]).all()
    assert "missing or damaged" in refused(tiny, tmp_path, "test")


@pytest.mark.parametrize("tiny", ["mnist"], indirect=True)
def test_requests_that_cannot_be(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    with pytest.raises(DataError, match=r"--ways 5: mnist has 10 classes; give --ways 10"):
        open_examples("train", name="mnist", ways=5, data_root=tmp_path)
    few_shot = {"ways": 5, "shots": 1, "queries": 1, "seed": 0}
    with pytest.raises(DataError, match=r"--data mnist: no few-shot .*--learner supervised"):
        open_episodes("mnist", "train", data_root=tmp_path, **few_shot)  # type: ignore[arg-type]
