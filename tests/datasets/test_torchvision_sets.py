"""torchvision's sets are found, checked, downloaded and decoded once, or missed in one line."""

from pathlib import Path

import numpy as np
import pytest

from datasets import DataError, open_episodes
from datasets.torchvision_sets import SOURCES, open_examples, open_part, split_rows
from tests.datasets.tiny_torchvision import Tiny

NAMES = list(SOURCES)


@pytest.fixture
def tiny(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> Tiny:
    """A miniature that counts as published; no network, and nothing on disk yet."""
    made = Tiny(request.param)
    made.install(monkeypatch)
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


@kinds
def test_missing_data_names_the_folder_and_the_ways_out(
    tiny: Tiny, tmp_path: Path, empty_cache: Path
) -> None:
    message = refused(tiny, tmp_path / "nowhere")
    where = tmp_path / "nowhere" / tiny.name
    assert message.startswith(f"{where}: {tiny.name} is missing or damaged")
    for words in ("was not downloaded (", "--data-root", "$MAML_DATA", "*-glyphs-*"):
        assert words in message
    assert list(empty_cache.rglob("*.npy")) == []
    # What was decoded needs the files no more.
    tiny.write(tmp_path)
    open_part(tiny.name, "train", tmp_path)
    tiny.folder = Path("nowhere")
    images, labels = open_part(tiny.name, "train", tmp_path)
    assert (images == tiny.images["train"]).all() and (labels == tiny.labels["train"]).all()


@pytest.mark.parametrize("tiny", ["mnist"], indirect=True)
def test_requests_that_cannot_be(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    with pytest.raises(DataError, match=r"--ways 5: mnist has 10 classes; give --ways 10"):
        open_examples("train", name="mnist", ways=5, data_root=tmp_path)
    few_shot = {"ways": 5, "shots": 1, "queries": 1, "seed": 0}
    with pytest.raises(DataError, match=r"--data mnist: no few-shot .*--learner supervised"):
        open_episodes("mnist", "train", data_root=tmp_path, **few_shot)  # type: ignore[arg-type]
