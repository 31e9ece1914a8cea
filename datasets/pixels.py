"""What becomes of an image of any size, mode and depth: a square of 8-bit pixels."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from datasets.errors import DataError
from datasets.registry import find
from datasets.words import counted

Mode = Literal["rgb", "grey"]

_MOST_PIXELS = 4096


class Decoder:
    """Makes images arrays, ``size`` pixels wide and high, in colour (rgb) or not (grey)."""

    def __init__(self, size: int, mode: str) -> None:
        """Raise :class:`DataError`, naming the flag, for a size or mode that cannot be."""
        if not 1 <= size <= _MOST_PIXELS:
            raise DataError(f"--image-size {size}: must be between 1 and {_MOST_PIXELS}")
        if mode not in ("rgb", "grey"):
            raise DataError(f"--image-mode {mode}: unknown; one of rgb, grey")
        self.size, self.mode = size, mode
        # The highest values of the images that have 16 bits a value.
        self._highest: list[int] = []

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an image: ``[size, size, 3]`` or ``[size, size]``."""
        return (self.size, self.size, 3) if self.mode == "rgb" else (self.size, self.size)

    def file(self, opened: Image.Image) -> NDArray[np.uint8]:
        """An image file that Pillow has just opened, as :meth:`image`."""
        # A JPEG much larger than wanted is decoded at a half, a quarter or an eighth of its size.
        opened.draft(None, (2 * self.size, 2 * self.size))
        return self.image(opened)

    def image(self, opened: Image.Image) -> NDArray[np.uint8]:
        """One image as uint8 ``[size, size]`` or ``[size, size, 3]``.

        It is turned upright as its EXIF data says, transparent parts become white, 16 or 12 bits 8,
        the first picture of an animation is taken. Its shorter side becomes ``size`` pixels long,
        and what the longer one has more is cut off on both ends: proportions are kept. Raises
        ``ValueError`` for pixels whose range nobody knows, and what Pillow raises for damaged ones.
        """
        image = self._eight_bits(opened)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB" if self.mode == "rgb" else "L")
        fitted = ImageOps.fit(image, (self.size, self.size), Image.Resampling.LANCZOS)
        return np.asarray(fitted, dtype=np.uint8)

    def _eight_bits(self, opened: Image.Image) -> Image.Image:
        """An image upright and with 8 bits.

        Pillow cuts values of 16 bits off at 255, it does not scale them; those of colours it
        scales.
        """
        tiles = getattr(opened, "tile", None)  # until it is loaded
        stored = str(tiles[0][3]) if tiles else ""
        image = ImageOps.exif_transpose(opened)
        if image.mode == "F":
            raise ValueError("floating-point pixels: their range is not known")
        if not image.mode.startswith("I"):
            if ";16" in stored and image.mode.startswith("RGB"):
                extrema = np.reshape(image.getextrema(), (-1, 2))
                self._highest.append(256 * int(extrema[:3, 1].max()) + 255)
            return image
        pixels = np.asarray(image).astype(np.int64)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError("pixels of more than 16 bits: their range is not known")
        twelve = "I;12" in stored
        if not twelve:
            self._highest.append(int(pixels.max()))
        return Image.fromarray((pixels / (4095 / 255 if twelve else 257)).round().astype(np.uint8))

    def too_dark(self) -> str:
        """Say that the images, all together, use a few of their 16 bits alone; "" if they do not.

        Which bits are used no PNG file says for sure. One image may be dark; all of a set are not.
        """
        most = max(self._highest, default=0)
        if not 0 < most <= 4095:
            return ""
        bits = 8 if most < 256 else 12
        return (
            f"{counted(len(self._highest), 'image')} of 16 bits a value, none of which is above "
            f"{most}: as 16 bits they are black. If they have {bits} bits, multiply the values by "
            f"{2 ** (16 - bits)}, or save images of 8 bits"
        )


def as_in(data: str, pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures uint8 ``[n, H, W]`` or ``[n, H, W, 3]`` as the data set's own images are.

    For drawings, bright paper (the median of a picture's pixels) means dark ink, and the two are
    swapped: a scan is learned from as Omniglot's files are.
    """
    if not find(data).ink:
        return pictures
    bright = np.median(pictures.reshape(len(pictures), -1), axis=1) > 127
    return np.where(bright.reshape(-1, *[1] * (pictures.ndim - 1)), 255 - pictures, pictures)
