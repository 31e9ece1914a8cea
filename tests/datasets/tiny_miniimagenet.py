"""A split of MiniImageNet in miniature, written to disk the way the real one is packed."""

import io
import pickle
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.datasets.tiny_torchvision import packed_tar, write_files

LABELS = ["n01", "n02", "n03"]
PER_CLASS = 4
NAMES = {label: [f"{label}{number:08d}.jpg" for number in range(PER_CLASS)] for label in LABELS}
ROWS = [(name, label) for label in LABELS for name in NAMES[label]]


def colour(name: str) -> np.ndarray:
    """Return the only colour of an image, far from all other images' colours: uint8 [3]."""
    label, number = LABELS.index(name[:3]), int(name[3:-4])
    return np.array([40 + 80 * label, 30 + 60 * number, 90], dtype=np.uint8)


def picture(name: str, size: tuple[int, int] = (84, 84)) -> bytes:
    buffer = io.BytesIO()
    pixels = np.broadcast_to(colour(name), (size[1], size[0], 3))
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def members() -> dict[str, bytes]:
    return {f"images/{name}": picture(name) for name, _ in ROWS}


def write_csv(folder: Path, rows: Iterable[tuple[str, str]] = ROWS) -> None:
    lines = ["filename,label", *map(",".join, rows)]
    write_files(folder, {"val.csv": "".join(f"{line}\n" for line in lines).encode()})


def write_archive(folder: Path, contents: dict[str, bytes] | None = None) -> Path:
    """Write ``val.tar.xz``, by default the complete one."""
    write_files(folder, {"val.tar.xz": packed_tar(contents or members(), "w:xz", preset=0)})
    return folder / "val.tar.xz"


def write_classes(folder: Path, name: str = "val") -> Path:
    write_files(folder / name, {f"{label}/{image}": picture(image) for image, label in ROWS})
    return folder / name


def entries(images: np.ndarray) -> dict[str, object]:
    """Return the pickle's content for ``images``, ``[classes, images, 84, 84, 3]``.

    The classes are not in the order of their names.
    """
    rows = np.arange(len(LABELS) * PER_CLASS).reshape(-1, PER_CLASS).tolist()
    return {
        "image_data": images[::-1].reshape(-1, *images.shape[2:]),
        "class_dict": dict(zip(LABELS[::-1], rows, strict=True)),
    }


def write_pickle(folder: Path, content: object, name: str = "val") -> None:
    write_files(folder, {f"mini-imagenet-cache-{name}.pkl": pickle.dumps(content, protocol=2)})
