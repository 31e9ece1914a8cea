"""Omniglot is found, decoded once and never masked by an old cache; each error is one line."""

import hashlib
import io
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import DataError, omniglot, open_batches
from datasets.omniglot import PARTS, SPLITS, find_part, open_images, split_classes
from tests.datasets import tiny_omniglot as tiny
from tests.datasets.tiny_torchvision import Web, md5, write_files

PART = "images_background"
CHARACTERS = {part: sum(alphabets.values()) for part, alphabets in tiny.PARTS.items()}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data root of a complete miniature data set, zipped."""
    monkeypatch.setattr(omniglot, "PARTS", CHARACTERS)
    monkeypatch.setattr(omniglot, "NAMES", zlib.crc32("\n".join(tiny.NAMES).encode()))
    for part in tiny.PARTS:
        tiny.write_zip(tmp_path / "data" / "omniglot", part)
    return tmp_path / "data"


def test_decoded_once_then_mapped(root, tmp_path, empty_cache, monkeypatch):
    images, names = omniglot.open_images(root)
    assert images.shape == (7, 20, 28, 28) and images.dtype == np.uint8 and names == tiny.NAMES
    assert len(list(empty_cache.glob("omniglot/28x28-*.npy"))) == 1
    with monkeypatch.context() as patch:
        patch.setattr(omniglot, "decode", lambda *_: pytest.fail("decoded again"))
        assert (omniglot.open_images(root)[0] == images).all()
        # The same contents elsewhere, packed again, are the same cache.
        for part in tiny.PARTS:
            contents = dict(reversed(tiny.members(part).items()))
            tiny.write_zip(tmp_path / "repacked" / "omniglot", part, contents)
        assert (omniglot.open_images(tmp_path / "repacked")[0] == images).all()
    # Folders give the same images. A changed archive gives changed images despite the cache.
    for part in tiny.PARTS:
        write_files(tmp_path / "extracted" / "omniglot", tiny.members(part))
    assert (omniglot.open_images(tmp_path / "extracted")[0] == images).all()
    assert len(list(empty_cache.glob("omniglot/*.npy"))) == 2
    contents = tiny.members("images_evaluation")
    changed = next(n for n in contents if n.endswith("0006_20.png"))
    contents[changed] = tiny.png(np.eye(105, dtype=bool))
    tiny.write_zip(root / "omniglot", "images_evaluation", contents)
    after, _ = omniglot.open_images(root)
    assert (after[6, 19] != images[6, 19]).any() and (after[:6] == images[:6]).all()


def test_other_alphabets_are_refused(root, empty_cache, monkeypatch):
    """In another split they would be, without a word."""
    renamed = {
        n.replace("Middle", "Other"): d for n, d in tiny.members("images_evaluation").items()
    }
    tiny.write_zip(root / "omniglot", "images_evaluation", renamed)
    with pytest.raises(DataError, match="its alphabets are not Omniglot's"):
        open_images(root)


def test_classes_are_turned_in_every_split(root, empty_cache, monkeypatch):
    """MAML's code turns classes in training and at test; MAML++'s code only in training."""
    splits = {"train": [1, 2, 4], "test": [3, 6]}
    rows_of = lambda name, split, _: np.array(splits[split]) - (name == "vinyals")  # noqa: E731
    monkeypatch.setattr(omniglot, "split_classes", rows_of)
    for split, rows in splits.items():
        found = omniglot.open_classes(split, data_root=root)
        assert found.rotate and (found.first // 20).tolist() == rows
        of_mamlpp = omniglot.open_classes(split, data_root=root, omniglot_split="mamlpp")
        assert of_mamlpp.rotate == (split == "train")
        # Ordinary classification always has the training classes of the named division.
        for name, own in (("maml", {1, 2}), ("vinyals", {0, 1})):
            asked = {"ways": 2, "seed": 0, "data_root": root, "omniglot_split": name}
            batches = open_batches(
                "omniglot", split, evaluation=False, batch_size=1, dtype=torch.float32, **asked
            )
            assert set(batches._examples.rows // 20) == own


def test_downloads_what_is_missing_and_keeps_it(root, tmp_path, monkeypatch, empty_cache):
    """From the official site, with the checksums of its archives."""
    from torchvision.datasets import Omniglot

    archives = {path.name: path.read_bytes() for path in (root / "omniglot").iterdir()}
    monkeypatch.setattr(Omniglot, "zips_md5", {n[:-4]: md5(data) for n, data in archives.items()})
    mirror = Web(archives, monkeypatch)
    fresh = tmp_path / "fresh"
    images, _ = omniglot.open_images(root)
    assert (omniglot.open_images(fresh)[0] == images).all()
    assert {path.name for path in fresh.rglob("*.zip")} == archives.keys()
    mirror.files.clear()
    assert (omniglot.open_images(fresh)[0] == images).all()
    # With the wrong checksum it is discarded, and its folder, too. One line has the ways out.
    mirror.files["images_background.zip"] = b"another"
    ways_out = r"put images_background\.zip .*--data-root .*downloads.*maml-glyphs-"
    place = tmp_path / "wrong/omniglot/images_background.zip"
    with pytest.raises(DataError, match=rf"^{place}: not found, .*corrupted.*{ways_out}[^\n]*$"):
        omniglot.open_images(tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


# ---- its parts --------------------------------------------------------------------------------


def expected(png: bytes) -> np.ndarray:
    """Lanczos on grey: on one-bit images Pillow falls back to nearest."""
    with Image.open(io.BytesIO(png)) as bits:
        assert bits.mode == "1", "as the official files are"
        return 255 - np.asarray(bits.convert("L").resize((28, 28), Image.Resampling.LANCZOS))


def drawings_in(path: Path) -> np.ndarray:
    source, _ = find_part(path, CHARACTERS[PART])
    return np.concatenate(list(source.chunks())).reshape(-1, 20, 28, 28)


def test_characters_come_in_class_order_with_their_drawings_in_order(tmp_path):
    contents = tiny.members(PART)
    # Files that archivers add are ignored.
    name = next(iter(contents))
    contents[f"__MACOSX/{name}"] = contents[f"{PART}/README.txt"] = b"junk"
    contents[str(Path(name).with_name("._0000_01.png"))] = b"junk"
    characters = drawings_in(tiny.write_zip(tmp_path, PART, contents))
    assert len(characters) == 5
    for name, character in zip(tiny.NAMES, characters, strict=False):
        for number in (1, 2, 20):
            drawing = tiny.png(tiny.drawing(name, number))
            assert (character[number - 1] == expected(drawing)).all()


CHANGES = {
    "has 2 characters instead of 5;": lambda c: {n: d for n, d in c.items() if "Alpha" not in n},
    "Klingon/character01 has 1 drawings instead of 20;":
        lambda c: c | {f"{PART}/Klingon/character01/1.png": b""},
    "has 19 drawings instead of 20;": lambda c: dict(list(c.items())[1:]),
    "loose.png has 1 drawings instead of 20;": lambda c: c | {"loose.png": b""},
}  # fmt: skip


def test_what_is_incomplete_or_damaged_is_named(tmp_path):
    for words, change in CHANGES.items():
        path = tiny.write_zip(tmp_path, PART, change(tiny.members(PART)))
        again = f"^{path}: .*{re.escape(words)} fetch the complete archive again$"
        with pytest.raises(DataError, match=again):
            find_part(path, CHARACTERS[PART])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"^{path}: not a readable zip archive"):
        find_part(path, CHARACTERS[PART])
    write_files(tmp_path, tiny.members(PART))
    name = list(tiny.members(PART))[42]
    for content, says in ((b"?", ""), (tiny.png(np.eye(28) > 0), "28x28 pixels instead of 105")):
        (tmp_path / name).write_bytes(content)
        wrong = f"1 of 100 images cannot be decoded: .*{Path(name).name}.*{says}"
        with pytest.raises(DataError, match=wrong):
            drawings_in(tmp_path / PART)


# ---- splits -----------------------------------------------------------------------------------

# Digests of the rows of all splits.
GOLDEN = {"maml": "4ccd2b94b43fd042", "mamlpp": "bebe8d1cb300b82a", "vinyals": "9fc23585b56ae90a"}


@pytest.fixture
def names(data_root: Path) -> list[str]:
    """The names of all characters, from the published files."""
    folder = data_root / "omniglot"
    return [name for part in PARTS for name in find_part(folder / f"{part}.zip", PARTS[part])[1]]


@pytest.mark.parametrize("name", ["maml", "mamlpp"])
def test_splits_never_change_and_partition_the_classes(name, names=("",) * 1623):
    parts = [split_classes(name, split, names) for split in SPLITS[name]]
    assert [*map(len, parts)] == [*SPLITS[name].values()]
    rows = np.concatenate(parts)
    assert (np.sort(rows) == np.arange(1623)).all()
    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()[:16] == GOLDEN[name]
    with pytest.raises(DataError, match=r"--omniglot-split lake.*maml, mamlpp, vinyals"):
        split_classes("lake", "train", names)


def test_splits_by_alphabets_are_the_published_ones(names):
    assert len(set(names)) == 1623
    assert names[963:965] == ["Tifinagh/character55", "Angelic/character01"]
    test_splits_never_change_and_partition_the_classes("vinyals", names)
    rows = {s: split_classes("vinyals", s, names).tolist() for s in SPLITS["vinyals"]}
    rows["train"] = sorted(rows["train"] + rows["validation"])
    for split, expected in rows.items():
        assert split_classes("vinyals-trainval", split, names).tolist() == expected
