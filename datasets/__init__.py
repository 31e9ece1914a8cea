"""Data sets as endless, addressable streams of tasks. Nothing here imports from ``maml``.

To add a data set, add one file with an opener (:mod:`datasets.opening` describes its arguments and
results) and facts (:class:`datasets.registry.DataSet`). No other list names the data set. Names are
imported lazily, so that the command line does not wait for torch. If the repository is on the path,
this package hides Hugging Face's of the same name. In a wheel, this package is ``maml.datasets``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets.batches import Batches, Examples
    from datasets.episodes import Episodes, FewShotImages, ImageClasses
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
    "Batches", "DataError", "Episodes", "Examples", "FewShotImages", "ImageClasses", "Task",
    "contents", "image_shape", "open_batches", "open_environments", "open_episodes",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.opening"), name)
