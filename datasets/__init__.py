"""Data sets as endless, addressable streams of tasks. It imports nothing from ``maml``.

To add one, add a file with an opener (:mod:`datasets.opening`) and its facts. Names are imported
when they are asked for. The package shadows Hugging Face's ``datasets`` wherever the repository is
on the path: keep this file, and never build a wheel of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets.batches import Batches as Batches
    from datasets.batches import Examples as Examples
    from datasets.episodes import Episodes as Episodes
    from datasets.episodes import FewShotImages as FewShotImages
    from datasets.episodes import ImageClasses as ImageClasses
    from datasets.errors import DataError as DataError
    from datasets.opening import contents as contents
    from datasets.opening import image_shape as image_shape
    from datasets.opening import open_batches as open_batches
    from datasets.opening import open_environments as open_environments
    from datasets.opening import open_episodes as open_episodes
    from datasets.tasks import Task as Task

_WHERE = {
    "batches": ("Batches", "Examples"),
    "episodes": ("Episodes", "FewShotImages", "ImageClasses"),
    "errors": ("DataError",),
    "opening": ("contents", "image_shape", "open_batches", "open_environments", "open_episodes"),
    "tasks": ("Task",),
}


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
