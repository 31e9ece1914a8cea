"""Archives are checked by content and decoded as the papers say."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import DataError
from datasets.omniglot_source import Part, decode
from tests.datasets import tiny_omniglot as tiny

PART = "images_background"
TABLE = tiny.PARTS[PART]


def stroke() -> np.ndarray:
    """Ink, bool [105, 105]: a slanted line 3 pixels wide, as a pen leaves it."""
    y, x = np.mgrid[:105, :105]
    return (np.abs(x - 0.6 * y - 15) < 1.6) & (y > 10) & (y < 95)


def test_ink_is_bright_and_paper_is_dark():
    image = decode(tiny.png(stroke()))
    assert image.shape == (28, 28) and image.dtype == np.uint8
    assert image[0, 0] == 0 and image[:, -1].max() == 0
    assert image.max() > 150
    assert image.mean() < 60


def test_resize_is_lanczos_on_grey_not_nearest_on_bits():
    data = tiny.png(stroke())
    with Image.open(io.BytesIO(data)) as bits:
        assert bits.mode == "1", "the fixture must be one-bit, as the official files are"
        trap = 255 - np.asarray(bits.resize((28, 28), Image.Resampling.LANCZOS).convert("L"))
        expected = bits.convert("L").resize((28, 28), Image.Resampling.LANCZOS)
    assert set(np.unique(trap)) <= {0, 255}, "Pillow falls back to nearest on one-bit images"
    image = decode(data)
    assert len(np.unique(image)) > 20
    assert (image == 255 - np.asarray(expected)).all()
    # Averaging preserves the amount of ink; nearest does not, on thin strokes.
    assert abs(image.mean() / 255 - stroke().mean()) < 0.01


def test_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="28x28 pixels instead of 105x105"):
        decode(tiny.png(np.zeros((28, 28), dtype=bool)))


@pytest.mark.parametrize("write", [tiny.write_zip, tiny.write_folder])
def test_characters_come_in_class_order_with_their_drawings_in_order(tmp_path, write):
    characters = list(Part(write(tmp_path, PART), TABLE).characters())
    assert len(characters) == 5
    for name, character in zip(tiny.NAMES, characters, strict=False):
        assert character.shape == (20, 28, 28)
        for number in (1, 2, 20):
            expected = decode(tiny.png(tiny.drawing(name, number)))
            assert (character[number - 1] == expected).all()


def test_the_fingerprint_follows_the_contents_not_the_packing(tmp_path):
    contents = tiny.members(PART)
    one = Part(tiny.write_zip(tmp_path / "a", PART), TABLE).fingerprint()
    reordered = dict(reversed(contents.items()))
    assert Part(tiny.write_zip(tmp_path / "b", PART, reordered), TABLE).fingerprint() == one
    changed = dict(contents)
    changed[next(iter(changed))] = tiny.png(stroke())
    assert Part(tiny.write_zip(tmp_path / "c", PART, changed), TABLE).fingerprint() != one


def test_the_fingerprint_of_a_folder_follows_its_files(tmp_path):
    folder = tiny.write_folder(tmp_path, PART)
    one = Part(folder, TABLE).fingerprint()
    assert Part(folder, TABLE).fingerprint() == one
    file = next(folder.rglob("*.png"))
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert Part(folder, TABLE).fingerprint() != one


def test_what_archivers_add_is_ignored(tmp_path):
    contents = tiny.members(PART)
    name = next(iter(contents))
    contents[f"__MACOSX/{name}"] = b"junk"
    contents[str(Path(name).with_name("._0000_01.png"))] = b"junk"
    contents[f"{PART}/README.txt"] = b"hello"
    assert len(list(Part(tiny.write_zip(tmp_path, PART, contents), TABLE).characters())) == 5


def refused(path: Path, read: bool = False) -> str:
    with pytest.raises(DataError) as caught:
        part = Part(path, TABLE)
        if read:
            list(part.characters())
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def test_a_missing_character_is_named(tmp_path):
    contents = {n: d for n, d in tiny.members(PART).items() if "Zeta/character02" not in n}
    message = refused(tiny.write_zip(tmp_path, PART, contents))
    assert "Zeta/character02 is missing" in message


def test_a_missing_alphabet_is_named_by_its_first_character(tmp_path):
    contents = {n: d for n, d in tiny.members(PART).items() if "Alpha" not in n}
    message = refused(tiny.write_zip(tmp_path, PART, contents))
    assert "Alpha_(Beta)/character01 and 2 more characters are missing" in message


def test_an_unknown_alphabet_is_named(tmp_path):
    contents = tiny.members(PART)
    contents[f"{PART}/Klingon/character01/1.png"] = tiny.png(stroke())
    assert "Klingon/character01 is not part" in refused(tiny.write_zip(tmp_path, PART, contents))


@pytest.mark.parametrize("count", [19, 21])
def test_the_wrong_number_of_drawings_is_named(tmp_path, count):
    contents = tiny.members(PART)
    first = next(n for n in contents if "Zeta/character01" in n)
    if count == 19:
        del contents[first]
    else:
        contents[first.replace(".png", "b.png")] = contents[first]
    message = refused(tiny.write_zip(tmp_path, PART, contents))
    assert f"Zeta/character01 has {count} drawings instead of 20" in message


def test_a_drawing_outside_the_layout_is_named(tmp_path):
    contents = tiny.members(PART) | {"loose.png": tiny.png(stroke())}
    assert "loose.png" in refused(tiny.write_zip(tmp_path, PART, contents))


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / PART).mkdir()
    assert "missing" in refused(tmp_path / PART)


@pytest.mark.parametrize("keep", [0, 100, -100])
def test_a_truncated_archive_is_named(tmp_path, keep):
    path = tiny.write_zip(tmp_path, PART)
    path.write_bytes(path.read_bytes()[:keep])
    assert "not a readable zip archive" in refused(path)


def test_a_flipped_byte_in_a_drawing_is_caught_and_the_member_named(tmp_path):
    path = tiny.write_zip(tmp_path, PART)
    with zipfile.ZipFile(path) as archive:
        info = archive.infolist()[37]
    data = bytearray(path.read_bytes())
    data[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 0xFF
    path.write_bytes(data)
    assert info.filename in refused(path, read=True)


@pytest.mark.parametrize("data", [b"", b"not a picture", tiny.png(stroke())[:60]])
@pytest.mark.parametrize("packed", [True, False])
def test_an_undecodable_drawing_is_named(tmp_path, data, packed):
    contents = tiny.members(PART)
    broken = list(contents)[42]
    if packed:
        path = tiny.write_zip(tmp_path, PART, contents | {broken: data})
    else:
        path = tiny.write_folder(tmp_path, PART)
        (tmp_path / broken).write_bytes(data)
    message = refused(path, read=True)
    assert Path(broken).name in message and "cannot decode" in message
