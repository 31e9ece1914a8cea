"""A user's folder of images is found, divided and decoded once, and each mistake is one line."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import DataError, FewShotImages, folder
from datasets.cache import cache_root
from datasets.episodes import SPLITS
from datasets.folder import list_images
from datasets.image_files import Decoder
from tests.runs import refused

SIZE = 12


# No test may find images that another test decoded.
pytestmark = pytest.mark.usefixtures("empty_cache")


def shade(path: Path, value: int, size: tuple[int, int] = (SIZE, SIZE), mode: str = "L") -> Path:
    """Write an image of one grey (or, as JPEG, nearly)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = value if mode == "L" else (value,) * len(mode)
    Image.new(mode, size, colour).save(path)
    return path


def classes(root: Path, counts: dict[str, int]) -> Path:
    """Write PNGs ``0.png, 1.png, …`` into classes; image i of the c-th has the grey 20c + i."""
    for number, (name, count) in enumerate(counts.items()):
        for i in range(count):
            shade(root / name / f"{i}.png", 20 * number + i)
    return root


def open_them(root: Path, split: str = "train", *, size: int = SIZE, mode: str = "grey", **more):
    request = {"ways": 2, "shots": 1, "queries": 1, "seed": 0}
    request |= {name: more.pop(name) for name in list(more) if name in request}
    found = folder.open_classes(split, data_root=root, image_size=size, image_mode=mode, **more)
    return FewShotImages(found, split=split, **request)


def of_split(root: Path, split: str, **options) -> set[str]:
    return set(folder.open_classes(split, data_root=root, image_size=4, **options).names)


# ---- a stranger's folder ---------------------------------------------------------------------


def test_a_strangers_folder_gives_episodes_in_every_split(tmp_path, capfd):
    """With split folders, grey PNGs, colour JPEGs, several sizes, odd names, and other files."""
    root = tmp_path / "my photos"
    classes(root / "train", {"Äpfel": 3, "big dog": 7, "猫": 2})
    shade(root / "train" / "big dog" / "IMG 0001.JPG", 200, (90, 60), "RGB")
    shade(root / "train" / "big dog" / "ünï çødé.bmp", 210, (5, 31), "RGB")
    classes(root / "val", {"four": 4, "five": 5})
    classes(root / "test", {"only in the test": 2, "last": 3})
    elsewhere = classes(tmp_path / "elsewhere", {"linked": 4})
    (root / "test" / "linked").symlink_to(elsewhere / "linked")
    for name in ("README.md", "train/.hidden", "train/big dog/notes.txt", "train/big dog/clip.mpg"):
        (root / name).write_text("not an image")
    shade(root / "train" / "loose.png", 1)
    shade(root / "train" / ".thumbnails" / "0.png", 1)
    shade(root / "others" / "0.png", 1)
    for split, counts in {"train": [9, 3, 2], "validation": [5, 4], "test": [3, 4, 2]}.items():
        e = open_them(root, split)
        assert e.counts.tolist() == counts and not e.rotate
        task = e.tasks(torch.arange(50))
        assert task.support_x.shape == (50, 2, 1, SIZE, SIZE)
    said = capfd.readouterr().err
    assert f"decoding 14 images of {root} (train), once: " in said and said.count("once") == 3


def test_classes_beside_one_another_are_divided_once_and_for_all(tmp_path):
    root = classes(tmp_path / "flat", {f"class {i:02}": 2 for i in range(25)})
    splits = {split: of_split(root, split) for split in SPLITS}
    assert [len(names) for names in splits.values()] == [16, 4, 5]
    assert len(set.union(*splits.values())) == 25
    # The test classes are drawn at random, but the same on every machine and for every seed.
    assert sorted(name[-2:] for name in splits["test"]) == ["03", "08", "10", "14", "19"]
    copied = shutil.copytree(root, tmp_path / "elsewhere")
    assert of_split(copied, "test") == splits["test"]
    assert len(of_split(root, "train", split_fractions="0.2,0,0.8")) == 5
    message = r"--ways 2: too few classes for validation; .* train 5, validation 0, test 20: add"
    with pytest.raises(DataError, match=message):
        folder.open_classes("validation", data_root=root, split_fractions="0.2,0,0.8", ways=2)
    # A class may have the name of a split.
    odd = classes(tmp_path / "odd", {"test": 3, "train": 3, "bus": 3})
    assert of_split(odd, "train", split_fractions="1,0,0") == {"test", "train", "bus"}


# ---- decoded once ----------------------------------------------------------------------------


def cached_files() -> set[str]:
    return {path.name for path in (cache_root() / "folder").glob("*.npy")}


def test_what_changed_is_decoded_again_and_nothing_else(tmp_path, monkeypatch):
    root = classes(tmp_path / "mine", {"a": 3, "b": 3})
    options = {"split_fractions": "1,0,0", "queries": 1}
    first = open_them(root, **options).tasks(torch.arange(5))
    with monkeypatch.context() as patch:
        patch.setattr("datasets.image_files.decode_all", lambda *_: pytest.fail("decoded again"))
        again = open_them(root, **options).tasks(torch.arange(5))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    open_them(root, **options, mode="rgb")
    assert len(cached_files()) == 2
    os.utime(root / "a" / "1.png", ns=(1, 1))
    open_them(root, **options)
    assert len(cached_files()) == 3
    for count, changed in enumerate((root / "a" / "1.png", root / "b" / "7.png"), 4):
        shade(changed, 246 + count)
        task = open_them(root, **options).tasks(torch.arange(40))
        assert len(cached_files()) == count
        assert (task.support_x * 255).round().max() == 246 + count
    # Another folder of this name, whose files have the same names, sizes and times.
    open_them(shutil.copytree(root, tmp_path / "other" / "mine"), **options)
    assert len(cached_files()) == count + 1


# ---- pixels ----------------------------------------------------------------------------------


def pixels(folder: Path, image: Image.Image, mode: str = "grey", ending: str = "png", **how):
    path = folder / f"a.{ending}"
    image.save(path, **how)
    assert list_images(path) == [(str(path), "")]
    return Decoder(SIZE, mode).file(Image.open(path))


def test_proportions_are_kept_and_the_longer_side_is_cut_on_both_ends(tmp_path):
    for size, middle in (((60, 20), (20, 0, 40, 20)), ((20, 60), (0, 20, 20, 40))):
        image = Image.new("L", size)
        image.paste(255, middle)
        found = pixels(tmp_path, image)
        # The edges blend with what lies beyond them, as in any good resizing.
        assert (found[2:-2, 2:-2] > 240).all() and found.min() > 127


def test_exif_turns_an_image_upright(tmp_path):
    image = Image.new("RGB", (32, 32), "black")
    image.paste("white", (0, 0, 32, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees clockwise
    found = pixels(tmp_path, image, ending="jpg", exif=exif, quality=100)
    assert (found[:, 7:] > 250).all() and (found[:, :5] < 5).all()


def test_transparent_parts_become_white_and_every_mode_is_read(tmp_path):
    half = Image.new("RGBA", (SIZE, SIZE), (10, 20, 30, 0))
    half.paste((0, 0, 0, 255), (SIZE // 2, 0, SIZE, SIZE))
    for saved, mode in (("RGBA", "rgb"), ("LA", "grey")):
        found = pixels(tmp_path, half.convert(saved), mode)
        assert (found[:, : SIZE // 2] == 255).all() and (found[:, SIZE // 2 :] == 0).all()
    red = Image.new("RGB", (40, 40), (200, 10, 30))
    assert (pixels(tmp_path, red.quantize(), "rgb") == (200, 10, 30)).all()
    cmyk = pixels(tmp_path, red.convert("CMYK"), "rgb", "jpg", quality=100).astype(int)
    assert abs(cmyk - (200, 10, 30)).max() < 6
    one = Image.fromarray(np.eye(SIZE, dtype=bool))
    assert (pixels(tmp_path, one) == 255 * np.eye(SIZE)).all()


# ---- mistakes --------------------------------------------------------------------------------


def test_damaged_images_are_named(tmp_path):
    root = classes(tmp_path / "mine", {"a": 40, "b": 40})
    (root / "a" / "3.png").write_bytes(b"no image at all")
    whole = shade(root / "b" / "photo.jpg", 9, (300, 300), "RGB").read_bytes()
    (root / "b" / "photo.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "b" / "link.png").symlink_to(root / "nowhere.png")
    # The file does not say how many of 16 bits it uses: scaled, 12-bit images would be black.
    deep = np.full((SIZE, SIZE), 4095, np.uint16)
    Image.fromarray(deep).save(root / "b" / "deep.png")
    message = refused(open_them, root, split_fractions="1,0,0")
    assert message.startswith("4 of 83 images cannot be decoded: ")
    assert f"{root}/a/3.png (not an image that Pillow knows); " in message
    assert f"{root}/b/deep.png (more than 8 bits a pixel, of an unknown range" in message
    assert f"{root}/b/link.png (No such file or directory); " in message
    assert f"{root}/b/photo.jpg (" in message and "truncated" in message
    for number in range(9):
        (root / "a" / f"{number}.png").write_bytes(b"")
    assert "; and 7 more: repair" in refused(open_them, root, split_fractions="1,0,0")
    (root / "a" / "a\nb.png").write_bytes(b"")
    assert "/a\\nb.png'" in refused(open_them, root, split_fractions="1,0,0")
    (root / "cat").symlink_to(root / "nowhere")  # else a test would be on other classes
    assert f"{root}/cat: cannot be read (No such file" in refused(open_them, root)
    # No partly built file is left behind.
    assert not cached_files()


# The classes with their numbers of images, the options, and words of the message.
MISTAKES = [
    ({"a/none": 0}, {}, "/a/none: cannot be read (No such file"),
    ({"a": 2, "b": 2, "empty": 0}, {}, "/empty: no images in it; add some, or remove it"),
    ({"high/more": 2}, {}, "/high: no images in it; "),
    ({"train/a": 9, "train/small one": 3}, {"shots": 2, "queries": 4},
     "they need 6 images of a class, and the train split has 3 of train/small one; "),
    ({"train/a": 2, "train/b\u00e9": 2, "val/c": 2, "val/be\u0301": 2}, {},
     "train/b\u00e9 and val/be\u0301 have the same name"),
    ({"train/a": 2, "train/b": 2}, {"split": "validation"},
     "--ways 0: too few classes for validation; "),
    ({"train/a": 2, "train/b": 2}, {"split_fractions": "0.5,0.3,0.2"},
     "--split-fractions 0.5,0.3,0.2: "),
    ({"train/a": 2, "val/b": 2, "valid/c": 2}, {}, ": has val and valid, which mean"),
    ({}, {}, ": no folders of images in it; the whole"),
    ({"a": 2, "b": 2}, {"mode": "hsv"}, "--image-mode hsv: unknown; one of rgb, grey"),
    *(({"a": 2}, {"split_fractions": text}, f"--split-fractions {text}: must be three numbers")
      for text in ("", "nan,0.5,0.5", "1.2,-0.2,0")),
]  # fmt: skip


@pytest.mark.parametrize(("counts", "asked", "says"), MISTAKES)
def test_mistakes_are_one_line(tmp_path, counts, asked, says):
    root = tmp_path / "mine"
    root.mkdir()
    classes(root, counts)
    for name, count in counts.items():
        if not count and name != "a/none":
            (root / name).mkdir(parents=True)
            (root / name / "README.txt").write_text("to do")
    opened = root / "a" / "none" if "a/none" in counts else root
    assert says in refused(open_them, opened, **asked)


# ---- to predict with -------------------------------------------------------------------------


def test_images_without_classes_to_predict(tmp_path):
    for i in range(40):
        shade(tmp_path / "queries" / f"{i:02}.png", i)
    paths = [str(tmp_path / "queries" / f"{i:02}.png") for i in range(40)]
    assert list_images(str(tmp_path / "queries")) == [(path, "") for path in paths]
    shade(tmp_path / "queries" / "class" / "a.png", 1)
    with pytest.raises(DataError, match=r"holds images \(00.png\) and folders \(class\)"):
        list_images(tmp_path / "queries")
    shade(tmp_path / "named" / "e\u0301" / "a.png", 1)
    assert list_images(tmp_path / "named")[0][1] == "\u00e9"
    with pytest.raises(DataError, match="~no-such/x: cannot be read"):
        list_images("~no-such/x")
