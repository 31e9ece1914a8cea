"""Data sets as endless, addressable streams of tasks. It imports nothing from ``maml``.

To add a data set, add a file with an opener (:mod:`datasets.opening` says what it takes and
returns) and its facts (:class:`datasets.registry.DataSet`); no list elsewhere names it.

Names are imported when they are asked for: :mod:`datasets.registry` and :mod:`datasets.paths` serve
the command line, which does not wait for torch.

A top-level package called ``datasets`` shadows Hugging Face's wherever the repository is on the
path. That is accepted; in a wheel this one is ``maml.datasets`` (setup.py).
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
