"""Data sets as endless, addressable streams of tasks. It imports nothing from ``maml``.

To add a data set, add a file with an opener and one line to ``OPENERS``; if it has images, one to
``IMAGE_SHAPES`` too.

A top-level package called ``datasets`` shadows Hugging Face's of the same name wherever the
repository is on the path. That is accepted: this package is only ever run from the checkout. Keep
this file, and never build a wheel of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from datasets.cache import default_data_root
from datasets.episodes import Episodes, FewShotImages, Layout
from datasets.errors import DataError
from datasets.tasks import Task

__all__ = [
    "IMAGE_SHAPES",
    "OPENERS",
    "DataError",
    "Episodes",
    "FewShotImages",
    "Layout",
    "Task",
    "image_shape",
    "open_episodes",
]


def _omniglot(split: str, **options: Any) -> Episodes:
    from datasets.omniglot import open_omniglot

    return open_omniglot(split, **options)


def _glyphs(split: str, **options: Any) -> Episodes:
    from datasets.glyphs import open_glyphs

    return open_glyphs(split, **options)


def _miniimagenet(split: str, **options: Any) -> Episodes:
    from datasets.miniimagenet import open_miniimagenet

    return open_miniimagenet(split, **options)


def _sinusoid(split: str, **options: Any) -> Episodes:
    from datasets.sinusoid import open_sinusoid

    return open_sinusoid(split, **options)


# Openers import what they need when called: Pillow and torchvision are not for those who regress a
# sine.
OPENERS: dict[str, Callable[..., Episodes]] = {
    "omniglot": _omniglot,
    "glyphs": _glyphs,
    "miniimagenet": _miniimagenet,
    "sinusoid": _sinusoid,
}

# (C, H, W), for those who build a network before, or without, opening the data.
IMAGE_SHAPES: dict[str, tuple[int, int, int]] = {
    "omniglot": (1, 28, 28),
    "glyphs": (1, 28, 28),
    "miniimagenet": (3, 84, 84),
}


def image_shape(data: str) -> tuple[int, int, int] | None:
    """The (C, H, W) of a data set's images, known without opening it; None if it has none."""
    return IMAGE_SHAPES.get(data)


def open_episodes(
    data: str,
    split: str,
    *,
    ways: int,
    shots: int,
    queries: int,
    seed: int,
    data_root: Path | str | None = None,
    dtype: torch.dtype = torch.float32,
    omniglot_split: str = "maml",
) -> Episodes:
    """The tasks of a split of a data set.

    ``data`` is a key of ``OPENERS``; ``split`` is ``train``, ``validation`` or ``test``;
    ``data_root`` defaults to ``$MAML_DATA``, then ``~/.cache/maml``. Options that a data set has no
    use for are ignored (``ways`` by ``sinusoid``).

    Raises :class:`DataError`, whose message is for the user, if the request or the data is not in
    order.
    """
    if data not in OPENERS:
        raise DataError(f"--data {data}: unknown; one of {', '.join(OPENERS)}")
    return OPENERS[data](
        split,
        ways=ways,
        shots=shots,
        queries=queries,
        seed=seed,
        data_root=default_data_root() if data_root is None else Path(data_root),
        dtype=dtype,
        omniglot_split=omniglot_split,
    )
