"""What becomes of an image of any size and mode: a square of 8-bit pixels."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from datasets.errors import DataError
from datasets.registry import find

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

        It is turned upright as its EXIF data says, transparent parts become white. Its shorter side
        becomes ``size`` pixels long, and what the longer one has more is cut off on both ends.
        Raises ``ValueError`` for pixels whose range nobody knows, and Pillow's errors.
        """
        image = ImageOps.exif_transpose(opened)
        if image.mode[0] in "IF":
            raise ValueError("more than 8 bits a pixel, and no file says how many are used: save 8")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB" if self.mode == "rgb" else "L")
        fitted = ImageOps.fit(image, (self.size, self.size), Image.Resampling.LANCZOS)
        return np.asarray(fitted, dtype=np.uint8)


def as_in(data: str, pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures uint8 ``[n, H, W]`` or ``[n, H, W, 3]`` as the data set's own images are.

    For drawings, bright paper (the median of a picture's pixels) means dark ink, and the two are
    swapped: a scan is learned from as Omniglot's files are.
    """
    if not find(data).ink:
        return pictures
    bright = np.median(pictures.reshape(len(pictures), -1), axis=1) > 127
    return np.where(bright.reshape(-1, *[1] * (pictures.ndim - 1)), 255 - pictures, pictures)
