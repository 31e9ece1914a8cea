"""The data sets and their facts. Nothing here imports torch."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from datasets.components import Component, is_theirs, named, scan
from datasets.errors import DataError
from datasets.theirs import load_theirs

FLAG = "--data"


@dataclass(frozen=True)
class DataSet(Component):
    """A data set's facts; its attribute opens a split (`datasets.opening`) or is an environment."""

    # What learners can learn from it, as `maml.config.registry.LearnerFacts.tasks` says.
    tasks: tuple[str, ...] = ("episodes",)
    # (C, H, W) of its images, so that a network can be built before the data set is opened. If the
    # shape depends on fields that the data set reads: a function's name, which is called with them.
    image_shape: tuple[int, int, int] | str | None = None
    ink: bool = False  # images are ink (255) on paper (0); pictures of bright paper are inverted
    classifies: bool = True  # its targets are classes; if False, numbers to regress
    own_images: bool = False  # the images are the user's own, in --data-root
    point: tuple[int, int] = (1, 1)  # if no images: how many inputs and outputs an example has


@functools.cache
def data_sets() -> dict[str, DataSet]:
    """Return the data sets of this folder, by name. A file with facts is enough to add one."""
    here = Path(__file__).parent
    # Within a wheel this is `maml.datasets`: see setup.py.
    return scan([here], here.parents[__name__.count(".") - 1], DataSet)


@functools.lru_cache(maxsize=None, typed=True)  # typed: a `FromFile` name is another key
def find(name: str) -> DataSet:
    """Return a data set's facts. A user's own ``module:attribute`` is imported and has few facts.

    Raise a one-line :class:`DataError` that names the flag.
    """
    if is_theirs(name):
        parts, _ = load_theirs(FLAG, name, DataSet.GIVEN)
        return DataSet(name, *parts, reads=None, tasks=("episodes", "batches", "environments"))
    if name not in data_sets() and os.path.isdir(name):
        raise DataError(f"{FLAG} {name}: a folder; give --data folder and --data-root {name}")
    return named(FLAG, name, data_sets())
