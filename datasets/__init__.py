"""Data sets as endless, addressable streams of tasks. It imports nothing from ``maml``.

To add a data set, add a file with an opener (:mod:`datasets.opening` says what it takes and
returns) and its facts (:class:`datasets.registry.DataSet`); no list elsewhere names it. Names are
imported when they are asked for: the command line does not wait for torch. Hugging Face's package
of this name is shadowed where the repository is on the path; a wheel's is ``maml.datasets``.
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
