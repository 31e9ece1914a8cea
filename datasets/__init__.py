"""Data sets as endless, addressable streams of tasks. It imports nothing from ``maml``.

To add a few-shot data set, add a file with an opener and one line to ``OPENERS``; for ordinary
classification, one to ``EXAMPLE_OPENERS``; if it has images, one to ``IMAGE_SHAPES`` too.

A top-level package called ``datasets`` shadows Hugging Face's of the same name wherever the
repository is on the path. That is accepted: this package is only ever run from the checkout. Keep
this file, and never build a wheel of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from datasets.batches import Batches, Examples
from datasets.cache import default_data_root
from datasets.episodes import Episodes, FewShotImages, ImageClasses, Layout
from datasets.errors import DataError
from datasets.tasks import Task

__all__ = [
    "EXAMPLE_OPENERS",
    "IMAGE_SHAPES",
    "OPENERS",
    "Batches",
    "DataError",
    "Episodes",
    "Examples",
    "FewShotImages",
    "ImageClasses",
    "Layout",
    "Task",
    "image_shape",
    "open_batches",
    "open_episodes",
]


def _omniglot(split: str, **where: Any) -> ImageClasses:
    from datasets.omniglot import open_classes

    return open_classes(split, **where)


def _glyphs(split: str, **where: Any) -> ImageClasses:
    from datasets.glyphs import open_classes

    return open_classes(split, **where)


def _miniimagenet(split: str, **where: Any) -> ImageClasses:
    from datasets.miniimagenet import open_classes

    return open_classes(split, **where)


def _folder(split: str, **where: Any) -> ImageClasses:
    from datasets.folder import open_classes

    return open_classes(split, **where)


# What says where images are, and which; the rest of a request is of tasks.
_OF_IMAGES = ("data_root", "omniglot_split", "image_size", "image_mode", "split_fractions")


def _images(open_classes: Callable[..., ImageClasses]) -> Callable[..., Episodes]:
    """The opener of few-shot tasks of the classes that ``open_classes(split, ...)`` returns."""

    def open_them(split: str, **request: Any) -> Episodes:
        found = open_classes(split, **{name: request.pop(name) for name in _OF_IMAGES})
        return FewShotImages(**found._asdict(), split=split, **request)

    return open_them


def _sinusoid(split: str, **options: Any) -> Episodes:
    from datasets.sinusoid import open_sinusoid

    return open_sinusoid(split, **options)


# Openers import what they need when called: Pillow and torchvision are not for those who regress a
# sine.
OPENERS: dict[str, Callable[..., Episodes]] = {
    "omniglot": _images(_omniglot),
    "glyphs": _images(_glyphs),
    "miniimagenet": _images(_miniimagenet),
    "folder": _images(_folder),
    "sinusoid": _sinusoid,
}


def _flat_glyphs(split: str, **options: Any) -> Examples:
    from datasets.drawings import open_glyphs

    return open_glyphs(split, **options)


def _flat_omniglot(split: str, **options: Any) -> Examples:
    from datasets.drawings import open_omniglot

    return open_omniglot(split, **options)


def _torchvision(name: str) -> Callable[..., Examples]:
    def open_them(split: str, **options: Any) -> Examples:
        from datasets.torchvision_sets import open_examples

        return open_examples(name, split, **options)

    return open_them


EXAMPLE_OPENERS: dict[str, Callable[..., Examples]] = {
    "glyphs": _flat_glyphs,
    "omniglot": _flat_omniglot,
    **{name: _torchvision(name) for name in ("mnist", "fashion-mnist")},
    **{name: _torchvision(name) for name in ("cifar10", "cifar100", "svhn")},
}

# (C, H, W), for those who build a network before, or without, opening the data.
IMAGE_SHAPES: dict[str, tuple[int, int, int]] = {
    "omniglot": (1, 28, 28),
    "glyphs": (1, 28, 28),
    "miniimagenet": (3, 84, 84),
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
    "svhn": (3, 32, 32),
}


def image_shape(
    data: str, *, image_size: int = 84, image_mode: str = "rgb"
) -> tuple[int, int, int] | None:
    """The (C, H, W) of a data set's images, known without opening it; None if it has none.

    ``image_size`` and ``image_mode`` are those that a ``folder`` is opened with.
    """
    if data == "folder":
        return (3 if image_mode == "rgb" else 1, image_size, image_size)
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
    image_size: int = 84,
    image_mode: str = "rgb",
    split_fractions: str = "0.64,0.16,0.2",
) -> Episodes:
    """The few-shot tasks of a split of a data set.

    ``data`` is a key of ``OPENERS``; ``split`` is ``train``, ``validation`` or ``test``;
    ``data_root`` defaults to ``$MAML_DATA``, then ``~/.cache/maml``; for ``folder`` it is the
    folder of images itself (:mod:`datasets.folder`, which has the last three options). Options that
    a data set has no use for are ignored (``ways`` by ``sinusoid``).

    Raises :class:`DataError`, whose message is for the user, if the request or the data is not in
    order.
    """
    if data in EXAMPLE_OPENERS and data not in OPENERS:
        raise DataError(f"--data {data}: no few-shot data set; --learner supervised learns it")
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
        image_size=image_size,
        image_mode=image_mode,
        split_fractions=split_fractions,
    )


def open_batches(
    data: str,
    split: str,
    *,
    evaluation: bool,
    batch_size: int,
    ways: int,
    seed: int,
    data_root: Path | str | None = None,
    dtype: torch.dtype = torch.float32,
    omniglot_split: str = "maml",
) -> Batches:
    """The mini-batches of a split of a data set, as tasks: to learn from, or for ``evaluation``.

    ``data`` is a key of ``EXAMPLE_OPENERS``; the rest is as in :func:`open_episodes`. Raises
    :class:`DataError`, whose message is for the user, if the request or the data is not in order.
    """
    if data not in EXAMPLE_OPENERS:
        raise DataError(
            f"--data {data}: not for ordinary classification; one of {', '.join(EXAMPLE_OPENERS)}"
        )

    def examples(split: str) -> Examples:
        return EXAMPLE_OPENERS[data](
            split,
            ways=ways,
            data_root=default_data_root() if data_root is None else Path(data_root),
            omniglot_split=omniglot_split,
        )

    return Batches(
        examples(split),
        split=split,
        batch_size=batch_size,
        seed=seed,
        reference=examples("train") if evaluation else None,
        dtype=dtype,
    )
