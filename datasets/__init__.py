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
