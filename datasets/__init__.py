"""Data sets as endless, addressable streams of tasks. It imports nothing from ``maml``.

To add a data set, add a file with an opener (:mod:`datasets.opening` says what it takes and
returns) and its facts (:class:`datasets.registry.DataSet`); no list elsewhere names it.

Names are imported when they are asked for: :mod:`datasets.registry` and :mod:`datasets.paths` serve
the command line, which does not wait for torch.

A top-level package called ``datasets`` shadows Hugging Face's of the same name wherever the
repository is on the path. That is accepted: this package is only ever run from the checkout. Keep
this file, and never build a wheel of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets.batches import Batches, Examples
    from datasets.episodes import Episodes, FewShotImages, ImageClasses, Layout
    from datasets.errors import DataError
    from datasets.opening import (
        contents,
        image_shape,
        open_batches,
        open_environments,
        open_episodes,
    )
    from datasets.tasks import Task

__all__ = [
    "Batches",
    "DataError",
    "Episodes",
    "Examples",
    "FewShotImages",
    "ImageClasses",
    "Layout",
    "Task",
    "contents",
    "image_shape",
    "open_batches",
    "open_environments",
    "open_episodes",
]

_WHERE = {
    **dict.fromkeys(("Batches", "Examples"), "batches"),
    **dict.fromkeys(("Episodes", "FewShotImages", "ImageClasses", "Layout"), "episodes"),
    **dict.fromkeys(
        ("contents", "image_shape", "open_batches", "open_environments", "open_episodes"), "opening"
    ),
    "DataError": "errors",
    "Task": "tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
