"""Glyphs: characters that the program draws itself, so that a fresh machine has data.

A class is a character: two to four pen strokes. A stroke is a quadratic Bezier curve, often joined
to an earlier stroke. A drawing moves the control points a little and varies slant, size, position
and pen. Addresses determine all of this. The arithmetic is only ``+ - * / sqrt min max floor`` on
IEEE floats, elementwise, so every machine draws the same bits. We avoid ``sin`` and ``exp`` (they
differ between libraries), matrix products, and sums of unknown order.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from datasets import addresses
from datasets.cache import cached
from datasets.episodes import ImageClasses

COMPONENTS = {
    "glyphs": {
        "help": "characters that the program draws, 800/100/200 classes: no files needed",
        "attribute": "open_classes",
        "tasks": ("episodes", "batches"),
        "image_shape": (1, 28, 28),
        "ink": True,
    }
}

Floats = NDArray[np.float64]

SIZE = 28
DRAWINGS = 20
CLASSES: dict[str, int] = {"train": 800, "validation": 100, "test": 200}

# Raise this when the bits change. It is part of the cache's file name.
VERSION = 1
# A constant of the data set, not the run's --seed: there is one set of glyphs.
_SEED = 28

_STROKES = 4
_POINTS = 24
_CHUNK = 25

# How much a hand varies between drawings; together these set the difficulty. The jitter is in units
# of the character's box, which is 1 wide and 1 high. Scale, shift and pen are in pixels.
_JITTER = 0.09
_TURN = 0.16
_SHEAR = 0.22
_SCALE = (13.0, 19.0)
_SHIFT = 2.5
_PEN = (0.7, 1.25)


def open_classes(split: str, **_unused: object) -> ImageClasses:
    """Return the glyphs of a split, without rotation; the splits have disjoint classes.

    The cache has its drawings, uint8 ``[classes, 20, 28, 28]``: ink 255 on paper 0.
    """
    count = CLASSES[split]

    def chunks() -> Iterator[NDArray[np.uint8]]:
        # Draw a few at a time, so that the memory stays small and fits the processor's cache.
        for start in range(0, count, _CHUNK):
            yield draw(split, np.arange(start, min(start + _CHUNK, count)))

    name, title = f"glyphs/v{VERSION}-{split}-{count}.npy", f"drawing glyphs ({split})"
    images = cached(name, (count, DRAWINGS, SIZE, SIZE), chunks, title)
    return ImageClasses.of_equal_size(images, np.arange(count), rotate=False)


def draw(split: str, classes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Draw classes of a split: int64 ``[n]`` to uint8 ``[n, 20, 28, 28]``. Pure, uncached."""
    controls, present = _characters(addresses.keys(_SEED, split, "character", classes))
    index = classes[:, None] * DRAWINGS + np.arange(DRAWINGS)
    hand = addresses.uniforms(addresses.keys(_SEED, split, "hand", index), 7)
    jitter = addresses.uniforms(addresses.keys(_SEED, split, "jitter", index), _STROKES * 6)
    jitter = _JITTER * (2.0 * jitter - 1.0)
    moved = controls[:, None] + jitter.reshape(*index.shape, _STROKES, 3, 2)
    x, y = _place(_along(moved[..., 0]), _along(moved[..., 1]), hand)
    # Strokes that the character lacks go far away, where they leave no ink.
    x = np.where(present[:, None, :, None], x, 1e3)
    radius = _PEN[0] + (_PEN[1] - _PEN[0]) * hand[..., 6]
    n = index.size
    ink = _ink(x.reshape(n, -1), y.reshape(n, -1), radius.reshape(n))
    return ink.reshape(*index.shape, SIZE, SIZE)


def _characters(keys: addresses.Keys) -> tuple[Floats, NDArray[np.bool_]]:
    """Draw control points ``[n, S, 3, 2]`` in [-1/2, 1/2]^2, and which strokes exist ``[n, S]``."""
    n = len(keys)
    per_stroke = 8
    u = addresses.uniforms(keys, 1 + _STROKES * per_stroke)
    strokes = 2.0 + np.floor(3.0 * u[:, 0])
    present = np.arange(_STROKES) < strokes[:, None]
    u = u[:, 1:].reshape(n, _STROKES, per_stroke)
    controls = np.empty((n, _STROKES, 3, 2))
    for s in range(_STROKES):
        start = u[:, s, 0:2]
        if s > 0:
            # Most strokes start at the end or the middle of the last stroke: a pen seldom jumps.
            before = controls[:, s - 1]
            middle = 0.25 * before[:, 0] + 0.5 * before[:, 1] + 0.25 * before[:, 2]
            which = u[:, s, 6, None]
            start = np.where(which < 0.4, before[:, 2], np.where(which < 0.65, middle, start))
        end = u[:, s, 2:4]
        # A short stroke would be a dot after rasterising: mirror its end through the box's middle.
        across = end - start
        short = across[:, 0] * across[:, 0] + across[:, 1] * across[:, 1] < 0.2
        end = np.where(short[:, None], 1.0 - end, end)
        across = end - start
        normal = np.stack([-across[:, 1], across[:, 0]], axis=1)
        # A third of the strokes have no bend: hands like straight lines.
        bend = np.maximum(0.0, u[:, s, 4, None] * 1.5 - 0.5) * np.where(
            u[:, s, 5, None] < 0.5, -1.0, 1.0
        )
        controls[:, s, 0] = start
        controls[:, s, 1] = 0.5 * (start + end) + bend * normal
        controls[:, s, 2] = end
    return _boxed(controls, present), present


def _boxed(controls: Floats, present: NDArray[np.bool_]) -> Floats:
    """Scale the characters to the box [-1/2, 1/2]^2; a slender one stays slender to a degree."""
    there = present[:, :, None, None]
    low = np.where(there, controls, np.inf).min(axis=(1, 2))
    high = np.where(there, controls, -np.inf).max(axis=(1, 2))
    extent = high - low
    longest = np.maximum(extent[:, 0], extent[:, 1])[:, None]
    scale = np.maximum(extent, 0.5 * longest)
    return (controls - (0.5 * (low + high))[:, None, None]) / scale[:, None, None]


def _along(p: Floats) -> Floats:
    """Return points on quadratic Bezier curves: coordinates ``[..., S, 3]`` to ``[..., S, P]``."""
    t = np.arange(_POINTS) / (_POINTS - 1.0)
    s = 1.0 - t
    first, second, third = p[..., 0, None], p[..., 1, None], p[..., 2, None]
    return first * (s * s) + second * (2.0 * s * t) + third * (t * t)


def _place(x: Floats, y: Floats, hand: Floats) -> tuple[Floats, Floats]:
    """Slant, scale, turn and move points ``[..., S, P]`` by ``hand [..., 7]``; return pixels."""
    signed = 2.0 * hand - 1.0

    def part(values: Floats) -> Floats:
        return values[..., None, None]

    # The rational parametrisation of the circle needs no sine. t is the tangent of half the angle.
    t = part(_TURN * signed[..., 0])
    cosine, sine = (1.0 - t * t) / (1.0 + t * t), (2.0 * t) / (1.0 + t * t)
    width = part(_SCALE[0] + (_SCALE[1] - _SCALE[0]) * hand[..., 2])
    height = part(_SCALE[0] + (_SCALE[1] - _SCALE[0]) * hand[..., 3])
    x = width * (x + part(_SHEAR * signed[..., 1]) * y)
    y = height * y
    middle = 0.5 * (SIZE - 1)
    return (
        middle + part(_SHIFT * signed[..., 4]) + (cosine * x - sine * y),
        middle + part(_SHIFT * signed[..., 5]) + (sine * x + cosine * y),
    )


def _ink(x: Floats, y: Floats, radius: Floats) -> NDArray[np.uint8]:
    """Rasterise ``[n, P]`` pen positions; ``radius [n]`` is in pixels: uint8 ``[n, 28, 28]``."""
    # The loop takes almost all the time. Single precision (IEEE, too) halves its memory traffic.
    grid = np.arange(SIZE, dtype=np.float32)
    x32, y32 = x.astype(np.float32), y.astype(np.float32)
    nearest = np.full((len(x), SIZE, SIZE), 1e6, dtype=np.float32)
    squared = np.empty_like(nearest)
    for point in range(x.shape[1]):
        dx, dy = grid - x32[:, point, None], grid - y32[:, point, None]
        np.add((dy * dy)[:, :, None], (dx * dx)[:, None, :], out=squared)
        np.minimum(nearest, squared, out=nearest)
    edge = radius.astype(np.float32)[:, None, None] + np.float32(0.5) - np.sqrt(nearest)
    ink = np.minimum(np.maximum(edge, np.float32(0)), np.float32(1))
    return np.floor(ink * np.float32(255) + np.float32(0.5)).astype(np.uint8)
