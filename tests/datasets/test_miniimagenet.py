"""MiniImageNet is found, checked against its table, decoded once, and missed in one clear line."""

from __future__ import annotations

import csv
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import (
    DataError,
    FewShotImages,
    ImageClasses,
    image_shape,
    miniimagenet,
    open_episodes,
)
from datasets.miniimagenet_source import SHAPE, Images, decode
from datasets.registry import data_sets
from tests.datasets import tiny_miniimagenet as tiny

REQUEST = {"ways": 5, "shots": 1, "queries": 15, "seed": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete validation split in miniature, with its archive."""
    folder = tmp_path / "data" / "miniimagenet"
    tiny.write_csv(folder)
    tiny.write_archive(folder)
    return folder


def open_tiny(folder: Path, split: str = "validation") -> np.ndarray:
    return miniimagenet.open_split(folder, split, len(tiny.LABELS), tiny.PER_CLASS)


def refused(folder: Path) -> str:
    """The one line that refuses ``folder``, which must leave no decoded file."""
    with pytest.raises(DataError) as caught:
        open_tiny(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    assert not list(Path(os.environ["MAML_CACHE"]).rglob("*.npy"))
    assert not list(Path(os.environ["MAML_CACHE"]).rglob("*.tmp"))
    return message


def check_order(images: np.ndarray) -> None:
    assert images.shape == (3, 4, 84, 84, 3) and images.dtype == np.uint8
    for row, label in enumerate(tiny.LABELS):
        for column, name in enumerate(tiny.NAMES[label]):
            found = images[row, column].reshape(-1, 3).astype(int)
            assert abs(found - tiny.colour(name)).max() < 8, name


def test_decoded_once_then_mapped(folder, empty_cache, monkeypatch):
    images = open_tiny(folder)
    assert isinstance(images, np.memmap) and not images.flags.writeable
    check_order(images)
    assert len(list(empty_cache.glob("miniimagenet/validation-*.npy"))) == 1
    monkeypatch.setattr(Images, "classes", lambda self: pytest.fail("decoded again"))
    assert (open_tiny(folder) == images).all()


def test_any_order_in_the_table_and_the_archive_gives_the_same_images(folder, tmp_path):
    contents = list(tiny.members().items())
    mixed = [contents[i] for i in np.random.default_rng(1).permutation(len(contents))]
    assert [name for name, _ in mixed] != sorted(name for name, _ in mixed)
    other = tmp_path / "mixed"
    tiny.write_csv(other, tiny.ROWS[::-1])
    # Any folder, and files that are not of this split, which an archive may hold too.
    extra = [("readme.txt", b"?"), ("x/._n0100000000.jpg", b"?"), ("n0900000000.jpg", b"?")]
    tiny.write_archive(other, extra + [(name.replace("images", "./x"), d) for name, d in mixed])
    assert (open_tiny(other) == open_tiny(folder)).all()


def test_an_extracted_folder_gives_the_same_images(folder, tmp_path, empty_cache):
    other = tmp_path / "extracted"
    tiny.write_csv(other)
    tiny.write_folder(other, tiny.members() | {"images/n0900000000.jpg": b"of another split"})
    assert (open_tiny(other) == open_tiny(folder)).all()
    assert len(list(empty_cache.glob("miniimagenet/*.npy"))) == 2


def test_every_form_gives_the_same_tasks(folder, tmp_path, empty_cache, monkeypatch):
    images = np.array(open_tiny(folder))
    by_class, pickled = tmp_path / "by class", tmp_path / "pickled"
    # Other files, and the table without its images, do not matter.
    tiny.write_csv(by_class)
    (tiny.write_classes(by_class) / "n01" / "readme.txt").write_text("?")
    (by_class / "val" / ".hidden").mkdir()
    tiny.write_pickle(pickled, tiny.entries(images))
    request = {"ways": 2, "shots": 1, "queries": 2, "seed": 3}
    found = []
    for root in (folder, by_class, pickled):
        opened = open_tiny(root)
        assert isinstance(opened, np.memmap) and (opened == images).all()
        monkeypatch.setattr(miniimagenet, "open_images", lambda *_, of=opened: of)
        episodes = open_episodes("miniimagenet", "validation", **request)
        found.append(episodes.tasks(episodes.ids(5, 3)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert len(list(empty_cache.glob("miniimagenet/*.npy"))) == 3
    # A file that changed is not masked by its cache, and learn2learn calls it otherwise.
    (pickled / "mini-imagenet-cache-val.pkl").unlink()
    tiny.write_pickle(pickled, tiny.entries(255 - images), name="validation")
    assert (open_tiny(pickled) == 255 - images).all()


def test_a_folder_of_classes_must_be_complete(tmp_path, empty_cache):
    by_class = tiny.write_classes(tmp_path / "data", name="validation")
    next((by_class / "n02").iterdir()).unlink()
    assert "validation: n02 has 3 images instead of 4" in refused(tmp_path / "data")
    for file in (by_class / "n02").iterdir():
        file.unlink()
    (by_class / "n02").rmdir()
    assert "validation: 2 classes instead of 3" in refused(tmp_path / "data")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: 3, "no image_data and class_dict"),
        (lambda e: {"image_data": e["image_data"]}, "no image_data and class_dict"),
        (lambda e: e | {"image_data": e["image_data"].astype("f4")}, r"image_data is float32 [12"),
        (lambda e: e | {"image_data": e["image_data"].tolist()}, "image_data is no array"),
        (lambda e: e | {"class_dict": {"n01": [0]}}, "1 classes instead of 3"),
        (lambda e: e | {"class_dict": e["class_dict"] | {"n02": [4]}}, "n02 is int64 [1] instead"),
        (lambda e: e | {"class_dict": e["class_dict"] | {"n02": [4, 5, 6, 12]}}, "beyond the 12"),
        (lambda e: e | {"class_dict": e["class_dict"] | {"n02": [4, 5, 6, 0]}}, "listed twice"),
    ],
)
def test_a_wrong_pickle_is_named(tmp_path, empty_cache, change, words):
    entries = tiny.entries(np.zeros((3, 4, 84, 84, 3), dtype=np.uint8))
    tiny.write_pickle(tmp_path, change(entries))
    message = refused(tmp_path)
    assert "mini-imagenet-cache-val.pkl" in message and words in message


def test_an_archive_comes_before_a_folder(folder):
    (folder / "images").mkdir()
    check_order(open_tiny(folder))


@pytest.mark.parametrize("packed", [True, False])
def test_changed_images_are_never_masked_by_the_old_cache(folder, empty_cache, packed):
    name = tiny.NAMES["n02"][1]
    contents = tiny.members()
    if not packed:
        (folder / "val.tar.xz").unlink()
        tiny.write_folder(folder)
    before = open_tiny(folder).copy()
    contents[f"images/{name}"] = tiny.picture(tiny.NAMES["n01"][0])
    if packed:
        tiny.write_archive(folder, contents.items())
    else:
        tiny.write_folder(folder, contents)
    after = open_tiny(folder)
    changed = (after != before).any(axis=(2, 3, 4))
    assert np.argwhere(changed).tolist() == [[1, 1]]


def test_a_changed_table_is_never_masked_by_the_old_cache(folder, empty_cache):
    before = open_tiny(folder).copy()
    renamed = {"n01": "n03", "n02": "n02", "n03": "n01"}
    tiny.write_csv(folder, [(name, renamed[label]) for name, label in tiny.ROWS])
    assert (open_tiny(folder) == before[::-1]).all()


def test_a_damaged_archive_is_reported_even_when_a_cache_exists(folder, empty_cache):
    open_tiny(folder)
    archive = folder / "val.tar.xz"
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(DataError, match=r"val\.tar\.xz"):
        open_tiny(folder)


def test_other_sizes_are_resized_with_lanczos_and_other_modes_are_coloured():
    noise = np.random.default_rng(0).integers(0, 256, (120, 200, 3), dtype=np.uint8)
    image = Image.fromarray(noise)

    def png(image: Image.Image) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return buffer.getvalue()

    expected = image.resize((84, 84), Image.Resampling.LANCZOS)
    assert (decode(png(image)) == np.asarray(expected)).all()
    grey = decode(png(image.convert("L")))
    assert grey.shape == SHAPE and (grey == grey[..., :1]).all()


def test_an_archive_of_originals(folder, empty_cache):
    sizes = [(500, 375), (84, 84), (40, 90)]
    contents = [
        (f"images/{name}", tiny.picture(name, sizes[i % 3]))
        for i, (name, _) in enumerate(tiny.ROWS)
    ]
    tiny.write_archive(folder, contents)
    check_order(open_tiny(folder))


def test_no_data_is_one_line_with_every_way_out(tmp_path, empty_cache):
    with pytest.raises(DataError) as caught:
        open_episodes("miniimagenet", "train", data_root=tmp_path / "none", **REQUEST)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{tmp_path / 'none' / 'miniimagenet' / 'train.csv'}: not found")
    for way_out in ("train.tar.xz", "images", "--data-root", "$MAML_DATA", "maml-glyphs-*"):
        assert way_out in message


def test_a_split_without_its_images_names_the_archive(folder, empty_cache):
    tiny.write_csv(folder, name="train")
    with pytest.raises(DataError) as caught:
        open_tiny(folder, "train")
    message = str(caught.value)
    assert message.startswith(f"{folder / 'train.tar.xz'}: not found, nor the folder images")
    assert "\n" not in message and "--data-root" in message
    # The splits that are there still open.
    check_order(open_tiny(folder))


def test_an_unknown_split_names_the_flag(tmp_path):
    with pytest.raises(DataError, match=r"--split val:.*train, validation, test"):
        miniimagenet.open_images(tmp_path, "val")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (tiny.ROWS[4:], "2 classes instead of 3"),
        (tiny.ROWS[:-1], "n03 has 3 images instead of 4"),
        (tiny.ROWS[:-1] + tiny.ROWS[-2:-1], "n0300000002.jpg is listed twice"),
        ([*tiny.ROWS[:-1], ("x.jpg", "")], "row 13 is not a file name and a label"),
        ([*tiny.ROWS[:-1], ("x.jpg",)], "row 13 is not a file name and a label"),
        ([*tiny.ROWS[:-1], ("../x.jpg", "n03")], "row 13 is not a file name and a label"),
        ([], "0 classes instead of 3"),
    ],
)
def test_a_wrong_table_is_named(folder, empty_cache, rows, words):
    tiny.write_csv(folder, rows)
    message = refused(folder)
    assert "val.csv" in message and words in message


@pytest.mark.parametrize("data", [b"", b"file,class\na,b\n", b"filename,label\n\xff\xfe,n01\n"])
def test_an_unreadable_table_is_named(folder, empty_cache, data):
    (folder / "val.csv").write_bytes(data)
    assert "val.csv" in refused(folder)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_missing_images_are_named(folder, empty_cache, packed, count):
    contents = dict(list(tiny.members().items())[:-count])
    if packed:
        tiny.write_archive(folder, contents.items())
    else:
        (folder / "val.tar.xz").unlink()
        tiny.write_folder(folder, contents)
    words = {1: "n0300000003.jpg is missing", 3: "n0300000001.jpg and 2 more are missing"}
    message = refused(folder)
    assert f"{words[count]}, of the 12 images in val.csv" in message
    assert ("val.tar.xz" if packed else "images") in message


def test_a_repeated_image_is_named(folder, empty_cache):
    contents = list(tiny.members().items())
    tiny.write_archive(folder, [*contents[:5], ("more/" + tiny.NAMES["n01"][0], b""), *contents])
    assert "more/n0100000000.jpg is there twice" in refused(folder)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("data", [b"", b"not a picture", tiny.picture(tiny.NAMES["n02"][2])[:400]])
def test_an_undecodable_image_is_named(folder, empty_cache, packed, data):
    name = f"images/{tiny.NAMES['n02'][2]}"
    contents = tiny.members() | {name: data}
    if packed:
        tiny.write_archive(folder, contents.items())
    else:
        (folder / "val.tar.xz").unlink()
        tiny.write_folder(folder, contents)
    message = refused(folder)
    assert f"cannot decode {name if packed else Path(name).name}" in message
    assert ("val.tar.xz" if packed else "images") in message


@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "last bytes", "flipped"])
def test_a_damaged_archive_is_named(folder, empty_cache, damage):
    archive = folder / "val.tar.xz"
    whole = archive.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
    archive.write_bytes(
        {
            "empty": b"",
            "text": b"hello" * 40,
            "truncated": whole[:middle],
            "last bytes": whole[:-20],
            "flipped": flipped,
        }[damage]
    )
    assert "val.tar.xz" in refused(folder)


def test_a_wrong_checksum_is_caught_though_every_image_decodes(folder, empty_cache):
    """Stored pixels may be anything: only the checksum behind the last one tells."""
    contents = dict(tiny.members())
    # Incompressible, so that a flipped byte in the compressed file is a byte of this member.
    noise = np.random.default_rng(0).bytes(1 << 18)
    archive = tiny.write_archive(folder, [*contents.items(), ("noise", noise)])
    data = bytearray(archive.read_bytes())
    at = bytes(data).find(noise[1 << 17 : (1 << 17) + 16])
    assert at > 0, "the noise should be stored as it is"
    data[at] ^= 1
    archive.write_bytes(data)
    assert "not a readable tar.xz archive" in refused(folder)


def test_tasks_are_what_the_layout_says_image_by_image():
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 8, 7, 3), dtype=np.uint8)
    e = FewShotImages(
        **ImageClasses.of_equal_size(images, np.arange(6), rotate=False)._asdict(),
        split="test",
        ways=4,
        shots=2,
        queries=3,
        seed=0,
        dtype=torch.float64,
    )
    ids = torch.tensor([0, 9, 2**40])
    task, layout = e.tasks(ids), e.layout(ids)
    assert task.support_x.shape == (3, 8, 3, 8, 7) and task.query_x.shape == (3, 12, 3, 8, 7)
    assert task.support_x.is_contiguous() and task.query_x.is_contiguous()
    for b in range(3):
        for way in range(4):
            for place in range(5):
                raw = images.reshape(30, 8, 7, 3)[layout.images[b, way, place]]
                expected = torch.from_numpy(raw).double().permute(2, 0, 1) / 255
                if place < 2:
                    found = task.support_x[b, way * 2 + place]
                else:
                    found = task.query_x[b, way * 3 + place - 2]
                assert torch.equal(found, expected)


def test_image_shapes_are_those_of_the_data(monkeypatch, small_images):
    assert image_shape("sinusoid") is None
    few_shot = [name for name, known in data_sets().items() if known.episodes]
    few_shot = [name for name in few_shot if name not in ("sinusoid", "folder")]
    rows = np.zeros((64, 600, *SHAPE), dtype=np.uint8)
    monkeypatch.setattr("datasets.miniimagenet.open_images", lambda *_: rows)
    monkeypatch.setattr(
        "datasets.omniglot.open_images", lambda *_: np.tile(small_images, (60, 1, 1, 1))
    )
    coloured = np.zeros((100, 2, 32, 32, 3), dtype=np.uint8)
    monkeypatch.setattr("datasets.cifar_few_shot.open_images", lambda *_: coloured)
    for data in few_shot:
        shape = image_shape(data)
        e = open_episodes(data, "validation", ways=5, shots=1, queries=1, seed=0)
        assert e.tasks(e.ids(0, 2)).query_x.shape == (2, 5, *shape)


@pytest.fixture(scope="session")
def real(data_root: Path, cache_dir: Path) -> Iterator[Callable[[str], np.ndarray]]:
    """The real images of a split, decoded once a session; skips where they are not."""
    folder = data_root / "miniimagenet"

    def open_real(split: str) -> np.ndarray:
        archive = folder / f"{miniimagenet.FILES[split]}.tar.xz"
        if not archive.is_file() and not (folder / "images").is_dir():
            pytest.skip(f"no {archive.name} or images/ in {folder}: set $MAML_DATA to test it")
        return miniimagenet.open_images(data_root, split)

    yield open_real
    # Hundreds of megabytes, and pytest keeps the folders of three sessions.
    for file in (cache_dir / "miniimagenet").glob("*.npy"):
        file.unlink()


@pytest.mark.parametrize("split", ["validation", "test"])
def test_real_images(real, data_root, split):
    images = real(split)
    assert images.shape == (miniimagenet.CLASSES[split], 600, *SHAPE)
    # Photographs, with the channels in order: ImageNet's means are 0.485, 0.456 and 0.406.
    red, green, blue = images[:, ::60].reshape(-1, 3).mean(axis=0) / 255
    assert 0.55 > red > green > blue > 0.35
    assert (images[:, ::60].std(axis=(2, 3)).max(axis=-1) > 5).all()
    # The first images of the archive, at the places that the table gives them.
    name = miniimagenet.FILES[split]
    archive = data_root / "miniimagenet" / f"{name}.tar.xz"
    if not archive.is_file():
        pytest.skip("the archive itself is not here")
    with open(archive.with_name(f"{name}.csv"), newline="") as file:
        labels = {row["filename"]: row["label"] for row in csv.DictReader(file)}
    order = sorted(labels, key=lambda name: (labels[name], name))
    with tarfile.open(archive, "r|xz") as opened:
        for member in islice((m for m in opened if m.isfile()), 0, 1300, 100):
            row, column = divmod(order.index(Path(member.name).name), 600)
            with Image.open(io.BytesIO(opened.extractfile(member).read())) as image:
                assert (images[row, column] == np.asarray(image)).all()


def test_real_episodes(real, data_root):
    real("test")
    e = open_episodes("miniimagenet", "test", data_root=data_root, **REQUEST)
    assert isinstance(e, FewShotImages) and not e.rotate and len(e.counts) == 20
    task = e.tasks(e.ids(0, 4))
    assert task.support_x.shape == (4, 5, 3, 84, 84)
    assert task.query_x.shape == (4, 75, 3, 84, 84)
    assert task.query_x.max() <= 1 and 0.3 < task.query_x.mean() < 0.6


def test_real_training_images_are_asked_for_or_open(data_root, empty_cache):
    folder = data_root / "miniimagenet"
    if not (folder / "train.csv").is_file():
        pytest.skip(f"no train.csv in {folder}")
    if (folder / "train.tar.xz").is_file() or (folder / "images").is_dir():
        pytest.skip("the training images are here")
    with pytest.raises(DataError, match=r"train\.tar\.xz: not found"):
        open_episodes("miniimagenet", "train", data_root=data_root, **REQUEST)
