"""MiniImageNet is found, checked against its table and decoded once; each error is one line."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import miniimagenet, open_episodes
from datasets.miniimagenet import SHAPE, decode
from tests.datasets import tiny_miniimagenet as tiny
from tests.datasets.tiny_torchvision import write_files
from tests.runs import refused

REQUEST = {"ways": 5, "shots": 1, "queries": 15, "seed": 0}


@pytest.fixture
def folder(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete validation split in miniature, with its archive."""
    monkeypatch.setattr(miniimagenet, "CLASSES", dict.fromkeys(miniimagenet.CLASSES, 3))
    monkeypatch.setattr(miniimagenet, "PER_CLASS", tiny.PER_CLASS)
    folder = tmp_path / "data" / "miniimagenet"
    tiny.write_csv(folder)
    tiny.write_archive(folder)
    return folder


@pytest.fixture
def others(folder: Path) -> list[Path]:
    return [folder.parents[1] / name / "miniimagenet" for name in "abc"]


def open_tiny(folder: Path) -> np.ndarray:
    found = miniimagenet.open_classes("validation", data_root=folder.parent)
    return found.images.reshape(len(found.counts), -1, *SHAPE)


def not_opened(folder: Path) -> str:
    """Return the one-line error for ``folder``, and check that no decoded file is left."""
    message = refused(open_tiny, folder)
    assert str(folder) in message
    assert not list(Path(os.environ["MAML_CACHE"]).rglob("*.npy"))
    assert not list(Path(os.environ["MAML_CACHE"]).rglob("*.tmp"))
    return message


def check_order(images: np.ndarray) -> None:
    assert images.shape == (3, 4, 84, 84, 3) and images.dtype == np.uint8
    for row, label in enumerate(tiny.LABELS):
        for column, name in enumerate(tiny.NAMES[label]):
            found = images[row, column].reshape(-1, 3).astype(int)
            assert abs(found - tiny.colour(name)).max() < 8, name


def test_any_order_any_size_and_other_files_in_the_archive(folder, others):
    check_order(open_tiny(folder))
    mixed, originals, _ = others
    tiny.write_csv(mixed, tiny.ROWS[::-1])
    # An archive may have another folder, another order, and files that are not of this split.
    extra = dict.fromkeys(("readme.txt", "x/._n0100000000.jpg", "n0900000000.jpg"), b"?")
    names = np.random.default_rng(1).permutation([name for name, _ in tiny.ROWS]).tolist()
    tiny.write_archive(mixed, extra | {f"./x/{name}": tiny.picture(name) for name in names})
    assert (open_tiny(mixed) == open_tiny(folder)).all()
    sizes = [(500, 375), (84, 84), (40, 90)]
    tiny.write_csv(originals)
    tiny.write_archive(originals, {n: tiny.picture(n, sizes[i % 3]) for i, n in enumerate(names)})
    check_order(open_tiny(originals))


def test_every_form_gives_the_same_images(folder, others, empty_cache):
    images = np.array(open_tiny(folder))
    extracted, by_class, pickled = others
    tiny.write_csv(extracted)
    write_files(extracted, tiny.members() | {"images/n0900000000.jpg": b"of another split"})
    # Other files, and the table without its images, do not matter.
    tiny.write_csv(by_class)
    (tiny.write_classes(by_class) / "n01" / "readme.txt").write_text("?")
    (by_class / "val" / ".hidden").mkdir()
    tiny.write_pickle(pickled, tiny.entries(images))
    for root in (folder, extracted, by_class, pickled):
        opened = open_tiny(root)
        assert isinstance(opened, np.memmap) and not opened.flags.writeable
        assert (opened == images).all()
    assert len(list(empty_cache.glob("miniimagenet/validation-*.npy"))) == 4
    # The old cache never masks a change. learn2learn gives the pickle this other name.
    (pickled / "mini-imagenet-cache-val.pkl").unlink()
    tiny.write_pickle(pickled, tiny.entries(255 - images), name="validation")
    assert (open_tiny(pickled) == 255 - images).all()
    other = {f"images/{tiny.NAMES['n02'][1]}": tiny.picture(tiny.NAMES["n01"][0])}
    tiny.write_archive(folder, tiny.members() | other)
    changed = (open_tiny(folder) != images).any(axis=(2, 3, 4))
    assert np.argwhere(changed).tolist() == [[1, 1]]
    tiny.write_archive(folder)
    renamed = {"n01": "n03", "n02": "n02", "n03": "n01"}
    tiny.write_csv(folder, [(name, renamed[label]) for name, label in tiny.ROWS])
    assert (open_tiny(folder) == images[::-1]).all()


def test_a_folder_of_classes_must_be_complete(others):
    by_class = tiny.write_classes(others[0], name="validation")
    next((by_class / "n02").iterdir()).unlink()
    assert "validation: n02 has 3 images instead of 4" in not_opened(others[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: 3, "no image_data and class_dict"),
        (lambda e: {"image_data": e["image_data"]}, "no image_data and class_dict"),
        (lambda e: e | {"image_data": e["image_data"].astype("f4")}, "image_data is no uint8"),
        (lambda e: e | {"image_data": e["image_data"].tolist()}, "list in place of an array"),
        (lambda e: e | {"class_dict": {"n01": [0]}}, "1 classes instead of 3"),
        (lambda e: e | {"class_dict": e["class_dict"] | {"n02": [4]}}, "n02 is not 4 rows"),
        (lambda e: e | {"class_dict": e["class_dict"] | {"n02": [4, 5, 6, 12]}}, "beyond the 12"),
        (lambda e: e | {"class_dict": e["class_dict"] | {"n02": [4, 5, 6, 0]}}, "a row twice"),
    ],
)
def test_a_wrong_pickle_is_named(others, change, words):
    entries = tiny.entries(np.zeros((3, 4, 84, 84, 3), dtype=np.uint8))
    tiny.write_pickle(others[0], change(entries))
    message = not_opened(others[0])
    assert "mini-imagenet-cache-val.pkl" in message and words in message


def test_other_sizes_are_resized_with_lanczos_and_other_modes_are_coloured():
    noise = np.random.default_rng(0).integers(0, 256, (120, 200, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    expected = image.resize((84, 84), Image.Resampling.LANCZOS)
    assert (decode(image) == np.asarray(expected)).all()
    grey = decode(image.convert("L"))
    assert grey.shape == SHAPE and (grey == grey[..., :1]).all()


def test_no_data_is_one_line_with_every_way_out(folder, others):
    tiny.write_csv(others[0])  # a table without its images
    for where, split in ((others[0], "validation"), (others[1], "train"), (folder, "train")):
        message = refused(open_episodes, "miniimagenet", split, data_root=where.parent, **REQUEST)
        assert message.startswith(f"{where}: has neither ")
        for way_out in (".tar.xz", "images", "--data-root", "$MAML_DATA", "-glyphs-"):
            assert way_out in message
    check_order(open_tiny(folder))  # the splits that are there still open


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (tiny.ROWS[4:], "2 classes instead of 3"),
        (tiny.ROWS[:-1] + tiny.ROWS[-2:-1], "n03 has 3 images instead of 4"),
        ([*tiny.ROWS[:-1], ("x.jpg", "")], "no table of filename,label (x.jpg of )"),
        ([*tiny.ROWS[:-1], ("../x.jpg", "n03")], "no table of filename,label (../x.jpg of n03)"),
        (b"file,class\na,b\n", "no table of filename,label"),
        (b"filename,label\n\xff\xfe,n01\n", "no table of filename,label"),
    ],
)
def test_a_wrong_table_is_named(folder, rows, words):
    if isinstance(rows, bytes):
        (folder / "val.csv").write_bytes(rows)
    else:
        tiny.write_csv(folder, rows)
    message = not_opened(folder)
    assert "val.csv" in message and words in message


def test_missing_and_undecodable_images_are_named(folder):
    archive = tiny.write_archive(folder, dict(list(tiny.members().items())[:-3]))
    says = f"3 of 12 images cannot be decoded: {archive}/n0300000001.jpg (not in the archive); "
    assert says in not_opened(folder)
    name = tiny.NAMES["n02"][2]
    damaged = tiny.members() | {f"images/{name}": tiny.picture(name)[:400]}
    tiny.write_archive(folder, damaged)
    assert f"1 of 12 images cannot be decoded: {archive}/{name} (" in not_opened(folder)


@pytest.mark.parametrize("damage", ["text", "truncated", "flipped", "checksum"])
def test_a_damaged_archive_is_named(folder, damage):
    """An xz file stores noise as it is: only the checksum after it detects a flipped byte."""
    # Incompressible, so that a flipped byte in the compressed file is a byte of this member.
    noise = np.random.default_rng(0).bytes(1 << 18)
    archive = tiny.write_archive(folder, tiny.members() | {"noise": noise})
    whole = archive.read_bytes()
    at = {"flipped": 300, "checksum": whole.find(noise[1 << 17 : (1 << 17) + 16])}.get(damage, 0)
    assert at >= 0, "the noise should be stored as it is"
    flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    damaged = {"text": b"hello" * 40, "truncated": whole[: len(whole) // 2]}
    archive.write_bytes(damaged.get(damage, flipped))
    assert "not a readable tar.xz file" in not_opened(folder)
