"""Omniglot is found, decoded once, never masked by an old cache, and missed in one clear line."""

from __future__ import annotations

import hashlib
import io
import shutil
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import DataError, FewShotImages, omniglot, open_episodes
from datasets.baselines import nearest_neighbour_accuracy
from datasets.omniglot_source import Part
from tests.datasets import tiny_omniglot as tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete miniature data set, zipped."""
    for part in tiny.PARTS:
        tiny.write_zip(tmp_path / "data" / "omniglot", part)
    return tmp_path / "data" / "omniglot"


@pytest.fixture
def offline(monkeypatch):
    """No network, at once rather than after a timeout."""

    def refuse(*args, **kwargs):
        raise urllib.error.URLError("[Errno -3] Temporary failure in name resolution")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def open_tiny(folder: Path) -> np.ndarray:
    return omniglot.open_parts(folder, tiny.PARTS)


def test_decoded_once_then_mapped(folder, empty_cache, monkeypatch):
    images = open_tiny(folder)
    assert images.shape == (7, 20, 28, 28) and images.dtype == np.uint8
    assert images.max() == 255 and images[..., 0, 0].max() == 0
    assert len(list(empty_cache.glob("omniglot/28x28-*.npy"))) == 1
    monkeypatch.setattr(Part, "characters", lambda self: pytest.fail("decoded again"))
    assert (open_tiny(folder) == images).all()
    # The same contents elsewhere, packed again, are the same cache.
    again = folder.parent / "repacked"
    for part in tiny.PARTS:
        tiny.write_zip(again, part, dict(reversed(tiny.members(part).items())))
    assert (open_tiny(again) == images).all()


def test_folders_give_the_same_images(folder, tmp_path, empty_cache):
    for part in tiny.PARTS:
        tiny.write_folder(tmp_path / "extracted", part)
    assert (open_tiny(tmp_path / "extracted") == open_tiny(folder)).all()
    assert len(list(empty_cache.glob("omniglot/*.npy"))) == 2


def test_a_changed_archive_is_never_masked_by_the_old_cache(folder, empty_cache):
    before = open_tiny(folder).copy()
    contents = tiny.members("images_evaluation")
    changed = next(n for n in contents if n.endswith("0006_20.png"))
    contents[changed] = tiny.png(np.eye(105, dtype=bool))
    tiny.write_zip(folder, "images_evaluation", contents)
    after = open_tiny(folder)
    assert (after[6, 19] != before[6, 19]).any()
    assert (after[:6] == before[:6]).all()


def test_a_damaged_archive_is_reported_even_when_a_cache_exists(folder, empty_cache):
    open_tiny(folder)
    archive = folder / "images_background.zip"
    archive.write_bytes(archive.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"images_background\.zip"):
        open_tiny(folder)


def test_processes_that_start_together_decode_once(folder, empty_cache, run_python, tmp_path):
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import tiny_omniglot as tiny
from datasets import omniglot
from datasets.omniglot_source import Part
import hashlib
characters = Part.characters
def logged(self):
    with open({str(tmp_path / "decoded")!r}, "a") as log:
        log.write(self.path.name + "\\n")
    yield from characters(self)
Part.characters = logged
print(hashlib.sha256(omniglot.open_parts(Path({str(folder)!r}), tiny.PARTS).tobytes()).hexdigest())
"""
    children = [run_python(code) for _ in range(2)]
    results = [(child.communicate(timeout=600), child.returncode) for child in children]
    assert all(code == 0 for _, code in results), results
    digests = {out.strip() for (out, _), _ in results}
    assert digests == {hashlib.sha256(open_tiny(folder).tobytes()).hexdigest()}
    decoded = (tmp_path / "decoded").read_text().split()
    assert decoded == ["images_background.zip", "images_evaluation.zip"]


def test_an_error_while_decoding_leaves_no_cache(folder, empty_cache):
    contents = tiny.members("images_evaluation")
    contents[list(contents)[5]] = b"broken"
    tiny.write_zip(folder, "images_evaluation", contents)
    with pytest.raises(DataError, match="cannot decode"):
        open_tiny(folder)
    assert [p.suffix for p in empty_cache.rglob("*") if p.is_file()] == [".lock"]


def test_a_carried_decoded_array_is_enough(folder, tmp_path, empty_cache, offline):
    carried = tmp_path / "carried"
    carried.mkdir()
    images = open_tiny(folder)
    np.save(carried / omniglot.CARRIED, images)
    found = open_tiny(carried)
    assert isinstance(found, np.memmap) and (found == images).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a[:-1], "6, 20, 28, 28"),
        (lambda a: a.astype(np.float32), "float32"),
        (lambda a: 255 - a, "paper is bright"),
    ],
)
def test_a_wrong_carried_array_is_refused(folder, tmp_path, empty_cache, change, words):
    carried = tmp_path / "carried"
    carried.mkdir()
    np.save(carried / omniglot.CARRIED, change(np.asarray(open_tiny(folder))))
    with pytest.raises(DataError) as caught:
        open_tiny(carried)
    assert words in str(caught.value) and omniglot.CARRIED in str(caught.value)


def test_no_data_and_no_network_is_one_line_with_every_way_out(tmp_path, empty_cache, offline):
    with pytest.raises(DataError) as caught:
        open_episodes(
            "omniglot", "train", ways=5, shots=1, queries=1, seed=0, data_root=tmp_path / "none"
        )
    message = str(caught.value)
    assert "\n" not in message
    for way_out in (
        str(tmp_path / "none" / "omniglot"),
        "images_background.zip",
        "images_evaluation.zip",
        "--data-root",
        "$MAML_DATA",
        "network",
        "maml-glyphs-*",
    ):
        assert way_out in message


def test_a_data_root_that_cannot_be_written_is_one_line(tmp_path, empty_cache, offline):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--data-root"):
        open_tiny(tmp_path / "file" / "omniglot")


TINY_SPLITS = {"train": [0, 2, 4], "validation": [1, 5], "test": [3, 6]}


@pytest.mark.parametrize("split", TINY_SPLITS)
def test_classes_are_turned_in_every_split(folder, empty_cache, monkeypatch, split):
    """As MAML's code does, in training and at test: each of the four ways comes up, of each class.

    The drawings and their quarter turns all differ, so that an image says what was done to it.
    """
    monkeypatch.setattr(omniglot, "PARTS", tiny.PARTS)
    monkeypatch.setattr(omniglot, "split_classes", lambda name, of: np.array(TINY_SPLITS[of]))
    images = open_tiny(folder)
    turned = {
        np.rot90(images[row, number], turns).tobytes(): (row, turns)
        for row in range(len(images))
        for number in range(images.shape[1])
        for turns in range(4)
    }
    assert len(turned) == 7 * 20 * 4
    e = open_episodes(
        "omniglot", split, ways=2, shots=1, queries=1, seed=0, data_root=folder.parent
    )
    task = e.tasks(e.ids(0, 50))
    pixels = (255 * torch.cat([task.support_x, task.query_x], dim=1)).round().byte().numpy()
    found = {turned[image.tobytes()] for image in pixels.reshape(-1, 28, 28)}
    assert found == {(row, turns) for row in TINY_SPLITS[split] for turns in range(4)}


@pytest.fixture
def mirror(folder, tmp_path, monkeypatch):
    """The official site, on this disk, with its checksums."""
    from torchvision.datasets import Omniglot

    site = tmp_path / "site"
    shutil.copytree(folder, site)
    sums = {p: hashlib.md5((site / f"{p}.zip").read_bytes()).hexdigest() for p in tiny.PARTS}
    monkeypatch.setattr(Omniglot, "download_url_prefix", site.as_uri())
    monkeypatch.setattr(Omniglot, "zips_md5", sums)
    return site


def test_downloads_what_is_missing_and_keeps_it(folder, tmp_path, mirror, empty_cache):
    fresh = tmp_path / "fresh" / "omniglot"
    assert (open_tiny(fresh) == open_tiny(folder)).all()
    assert sorted(p.name for p in fresh.glob("*.zip")) == [f"{p}.zip" for p in sorted(tiny.PARTS)]
    shutil.rmtree(mirror)
    assert (open_tiny(fresh) == open_tiny(folder)).all()


def test_a_download_with_the_wrong_checksum_is_discarded(tmp_path, mirror, empty_cache):
    with open(mirror / "images_background.zip", "ab") as archive:
        archive.write(b"more")
    with pytest.raises(DataError, match="MD5"):
        open_tiny(tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()


def test_an_unknown_split_is_reported_before_anything_is_read(tmp_path, offline):
    with pytest.raises(DataError, match="--omniglot-split lake"):
        omniglot.open_classes("train", data_root=tmp_path, omniglot_split="lake")


def test_real_images(omniglot_images):
    assert omniglot_images.shape == (1623, 20, 28, 28)
    assert omniglot_images.dtype == np.uint8
    assert 10 < omniglot_images.mean() < 40, "ink is bright, and there is little of it"
    # Every drawing has ink. The faintest are a few dots.
    assert (omniglot_images.reshape(1623 * 20, -1).max(axis=1) > 60).all()
    assert len(np.unique(omniglot_images)) == 256, "grey levels, not one bit"


def test_real_images_are_in_class_order(omniglot_images, data_root):
    archives = sorted((data_root / "omniglot").glob("images_*.zip"))
    if len(archives) != 2:
        pytest.skip("the archives themselves are not here")
    names = omniglot.class_names()
    for archive, rows in zip(archives, ((0, 500, 963), (964, 1300, 1622)), strict=True):
        with zipfile.ZipFile(archive) as opened:
            for row in rows:
                members = sorted(n for n in opened.namelist() if f"/{names[row]}/" in n)
                image = Image.open(io.BytesIO(opened.read(members[7]))).convert("L")
                expected = 255 - np.asarray(image.resize((28, 28), Image.Resampling.LANCZOS))
                assert (omniglot_images[row, 7] == expected).all()


def test_real_episodes(omniglot_images, data_root):
    e = open_episodes("omniglot", "test", ways=5, shots=1, queries=1, seed=0, data_root=data_root)
    assert isinstance(e, FewShotImages) and e.rotate
    turned = [
        omniglot.open_classes(split, data_root=data_root, omniglot_split=named).rotate
        for named in ("vinyals", "mamlpp")
        for split in ("train", "validation", "test")
    ]
    assert turned == [True, True, True, True, False, False]
    assert set(e.first // 20) == set(omniglot.split_classes("maml", "test"))
    task = e.tasks(e.ids(0, 32))
    assert task.support_x.shape == (32, 5, 1, 28, 28)
    assert 0.03 < task.support_x.mean() < 0.2
    # Vinyals et al. report 41.7 % for cosine on pixels; rotated, and with L2, it is near that.
    accuracy = nearest_neighbour_accuracy(e, torch.arange(500)).mean()
    assert 0.40 < accuracy < 0.53
