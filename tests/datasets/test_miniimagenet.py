"""MiniImageNet is found, checked against its table, decoded once, and missed in one clear line."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import DataError, FewShotImages, miniimagenet, open_episodes
from datasets.miniimagenet import SHAPE, decode
from tests.datasets import tiny_miniimagenet as tiny

REQUEST = {"ways": 5, "shots": 1, "queries": 15, "seed": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete validation split in miniature, with its archive."""
    folder = tmp_path / "data" / "miniimagenet"
    tiny.write_csv(folder)
    tiny.write_archive(folder)
    return folder


def write_images(folder: Path, contents: dict[str, bytes], packed: bool) -> None:
    """The images of the split, in its archive or in a folder."""
    if packed:
        tiny.write_archive(folder, contents.items())
    else:
        (folder / "val.tar.xz").unlink(missing_ok=True)
        tiny.write_folder(folder, contents)


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


def test_any_order_any_size_and_other_files_in_the_archive(folder, tmp_path):
    check_order(open_tiny(folder))
    contents = list(tiny.members().items())
    mixed = [contents[i] for i in np.random.default_rng(1).permutation(len(contents))]
    tiny.write_csv(tmp_path / "mixed", tiny.ROWS[::-1])
    # Any folder, and files that are not of this split, which an archive may hold too.
    extra = [("readme.txt", b"?"), ("x/._n0100000000.jpg", b"?"), ("n0900000000.jpg", b"?")]
    moved = [(name.replace("images", "./x"), data) for name, data in mixed]
    tiny.write_archive(tmp_path / "mixed", extra + moved)
    assert (open_tiny(tmp_path / "mixed") == open_tiny(folder)).all()
    sizes = [(500, 375), (84, 84), (40, 90)]
    names = [name for name, _ in tiny.ROWS]
    originals = [(n, tiny.picture(n, sizes[i % 3])) for i, n in enumerate(names)]
    tiny.write_csv(tmp_path / "originals")
    tiny.write_archive(tmp_path / "originals", originals)
    check_order(open_tiny(tmp_path / "originals"))


def test_every_form_gives_the_same_images(folder, tmp_path, empty_cache):
    images = np.array(open_tiny(folder))
    extracted, by_class, pickled = (tmp_path / name for name in ("a", "b", "c"))
    tiny.write_csv(extracted)
    tiny.write_folder(extracted, tiny.members() | {"images/n0900000000.jpg": b"of another split"})
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
    # A file that changed is not masked by its cache, and learn2learn calls it otherwise.
    (pickled / "mini-imagenet-cache-val.pkl").unlink()
    tiny.write_pickle(pickled, tiny.entries(255 - images), name="validation")
    assert (open_tiny(pickled) == 255 - images).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: 3, "no image_data and class_dict"),
        (lambda e: e | {"image_data": e["image_data"].astype("f4")}, "image_data is no uint8"),
        (lambda e: e | {"image_data": [[1]]}, "no image_data and class_dict"),
        (lambda e: e | {"class_dict": e["class_dict"] | {"n02": [4]}}, "n02 is not 4 rows"),
        (lambda e: e | {"class_dict": e["class_dict"] | {"n02": [4, 5, 6, 12]}}, "beyond the 12"),
        (lambda e: e | {"class_dict": e["class_dict"] | {"n02": [4, 5, 6, 0]}}, "a row twice"),
    ],
)
def test_a_wrong_pickle_is_named(tmp_path, empty_cache, change, words):
    entries = tiny.entries(np.zeros((3, 4, 84, 84, 3), dtype=np.uint8))
    tiny.write_pickle(tmp_path, change(entries))
    message = refused(tmp_path)
    assert "mini-imagenet-cache-val.pkl" in message and words in message


def test_what_changed_is_never_masked_by_the_old_cache(folder, empty_cache):
    before = open_tiny(folder).copy()
    other = {f"images/{tiny.NAMES['n02'][1]}": tiny.picture(tiny.NAMES["n01"][0])}
    tiny.write_archive(folder, (tiny.members() | other).items())
    changed = (open_tiny(folder) != before).any(axis=(2, 3, 4))
    assert np.argwhere(changed).tolist() == [[1, 1]]
    tiny.write_archive(folder)
    renamed = {"n01": "n03", "n02": "n02", "n03": "n01"}
    tiny.write_csv(folder, [(name, renamed[label]) for name, label in tiny.ROWS])
    assert (open_tiny(folder) == before[::-1]).all()


def test_other_sizes_are_resized_with_lanczos_and_other_modes_are_coloured():
    noise = np.random.default_rng(0).integers(0, 256, (120, 200, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    expected = image.resize((84, 84), Image.Resampling.LANCZOS)
    assert (decode(image) == np.asarray(expected)).all()
    grey = decode(image.convert("L"))
    assert grey.shape == SHAPE and (grey == grey[..., :1]).all()


def test_no_data_is_one_line_with_every_way_out(folder, tmp_path, empty_cache):
    with pytest.raises(DataError) as caught:
        open_episodes("miniimagenet", "train", data_root=tmp_path / "none", **REQUEST)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{tmp_path / 'none' / 'miniimagenet' / 'train.csv'}: not found")
    for way_out in ("train.tar.xz", "images", "--data-root", "$MAML_DATA", "maml-glyphs-*"):
        assert way_out in message
    # A table without its images; the splits that are there still open.
    tiny.write_csv(folder, name="train")
    with pytest.raises(DataError, match=r"train\.tar\.xz: not found, nor the folder images"):
        open_tiny(folder, "train")
    check_order(open_tiny(folder))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (tiny.ROWS[4:], "2 classes instead of 3"),
        (tiny.ROWS[:-1], "n03 has 3 images instead of 4"),
        (tiny.ROWS[:-1] + tiny.ROWS[-2:-1], "n0300000002.jpg is listed twice"),
        ([*tiny.ROWS[:-1], ("../x.jpg", "n03")], "no table of filename,label (../x.jpg of n03)"),
        (b"file,class\na,b\n", "no table of filename,label"),
        (b"filename,label\n\xff\xfe,n01\n", "no table of filename,label"),
    ],
)
def test_a_wrong_table_is_named(folder, empty_cache, rows, words):
    if isinstance(rows, bytes):
        (folder / "val.csv").write_bytes(rows)
    else:
        tiny.write_csv(folder, rows)
    message = refused(folder)
    assert "val.csv" in message and words in message


@pytest.mark.parametrize("packed", [True, False])
def test_missing_and_undecodable_images_are_named(folder, empty_cache, packed):
    where = folder / ("val.tar.xz" if packed else "images")
    write_images(folder, dict(list(tiny.members().items())[:-3]), packed)
    reason = "not in the archive" if packed else "No such file or directory"
    says = f"3 of 12 images cannot be decoded: {where}/n0300000001.jpg ({reason}); "
    assert says in refused(folder)
    name = tiny.NAMES["n02"][2]
    write_images(folder, tiny.members() | {f"images/{name}": tiny.picture(name)[:400]}, packed)
    assert f"1 of 12 images cannot be decoded: {where}/{name} (" in refused(folder)


@pytest.mark.parametrize("damage", ["text", "truncated", "checksum"])
def test_a_damaged_archive_is_named(folder, empty_cache, damage):
    """Stored pixels may be anything: only the checksum behind the last one tells."""
    # Incompressible, so that a flipped byte in the compressed file is a byte of this member.
    noise = np.random.default_rng(0).bytes(1 << 18)
    archive = tiny.write_archive(folder, [*tiny.members().items(), ("noise", noise)])
    whole = archive.read_bytes()
    at = whole.find(noise[1 << 17 : (1 << 17) + 16])
    assert at >= 0, "the noise should be stored as it is"
    flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    damaged = {"text": b"hello" * 40, "truncated": whole[: len(whole) // 2]}
    archive.write_bytes(damaged.get(damage, flipped))
    assert "not a readable tar.xz file" in refused(folder)


@pytest.mark.slow
def test_real_images_and_episodes(data_root, empty_cache):
    if not (data_root / "miniimagenet" / "test.csv").is_file():
        pytest.skip("no miniimagenet/test.csv: set $MAML_DATA to test it")
    e = open_episodes("miniimagenet", "test", data_root=data_root, **REQUEST)
    assert isinstance(e, FewShotImages) and not e.rotate and len(e.counts) == 20
    assert e.images.shape == (12_000, *SHAPE)
    # Photographs, with the channels in order: ImageNet's means are 0.485, 0.456 and 0.406.
    red, green, blue = e.images[::60].reshape(-1, 3).mean(axis=0) / 255
    assert 0.55 > red > green > blue > 0.35
    assert e.tasks(e.ids(0, 4)).query_x.shape == (4, 75, 3, 84, 84)
