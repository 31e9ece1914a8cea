"""A whole Omniglot in miniature, written to disk the way the real one is packed."""

import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

PARTS = {
    "images_background": {"Zeta": 2, "Alpha_(Beta)": 3},
    "images_evaluation": {"Middle": 2},
}
# In class order: parts in order, alphabets sorted in each.
NAMES = [
    *(f"Alpha_(Beta)/character{i:02d}" for i in (1, 2, 3)),
    *(f"Zeta/character{i:02d}" for i in (1, 2)),
    *(f"Middle/character{i:02d}" for i in (1, 2)),
]


def png(bits: np.ndarray) -> bytes:
    """A one-bit PNG as the official ones: ink is False (0), paper is True (1)."""
    buffer = io.BytesIO()
    Image.fromarray(np.where(bits, 0, 255).astype(np.uint8)).convert("1").save(buffer, "PNG")
    return buffer.getvalue()


def drawing(name: str, number: int) -> np.ndarray:
    """The ink of a drawing, bool [105, 105]: noise of its own."""
    return np.random.default_rng([NAMES.index(name), number]).random((105, 105)) < 0.2


def members(part: str) -> dict[str, bytes]:
    """Archive member to PNG for a part, in a scrambled order."""
    found = {}
    for alphabet, count in PARTS[part].items():
        for character in range(count, 0, -1):
            name = f"{alphabet}/character{character:02d}"
            for number in range(20, 0, -1):
                path = f"{part}/{name}/{NAMES.index(name):04d}_{number:02d}.png"
                found[path] = png(drawing(name, number))
    return found


def write_zip(folder: Path, part: str, contents: dict[str, bytes] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (members(part) if contents is None else contents).items():
            archive.writestr(name, data)
    return path
