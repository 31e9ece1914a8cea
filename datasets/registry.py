"""Which data sets there are, and what they say of themselves. Nothing here imports torch."""

import functools
from dataclasses import dataclass
from pathlib import Path

from datasets.components import Component, is_theirs, named, scan
from datasets.errors import DataError
from datasets.theirs import load_theirs

FLAG = "--data"


@dataclass(frozen=True)
class DataSet(Component):
    """A data set's facts. What its module lacks is None."""

    episodes: str | None = None  # the function that opens a split's few-shot tasks
    examples: str | None = None  # the same for ordinary classification
    environments: str | None = None  # the class of the environment to act in
    classes: str | None = None  # the function that lists each split's classes, opening none
    # (C, H, W) of its images, for who builds a network without opening it; or, where it depends on
    # the fields that it reads, the function that tells it, called with them.
    image_shape: tuple[int, int, int] | str | None = None
    ink: bool = False  # they are ink (255) on paper (0): pictures of bright paper are inverted
    classifies: bool = True  # its targets are classes; else numbers, which are regressed
    own_images: bool = False  # a user's own: --data-root says which there are
    point: tuple[int, int] = (1, 1)  # numbers of an example that is no image, and of its answer


@functools.cache
def data_sets() -> dict[str, DataSet]:
    """The data sets of this folder, by name: a file with facts is all that one needs."""
    here = Path(__file__).parent
    # Within a wheel this is `maml.datasets`: see setup.py.
    return scan([here], here.parents[__name__.count(".") - 1], DataSet)


@functools.lru_cache(maxsize=None, typed=True)  # what a file has said is another name
def find(name: str) -> DataSet:
    """A data set's facts; of a user's own ``module:attribute``, which is imported, few are known.

    Raises :class:`DataError`, in one line that names the flag.
    """
    if is_theirs(name):
        (module, attribute, arguments), _ = load_theirs(FLAG, name, DataSet.GIVEN)
        return DataSet(
            name, module, attribute, arguments, reads=None, episodes=attribute, examples=attribute
        )
    if name not in data_sets() and Path(name).is_dir():
        raise DataError(f"{FLAG} {name}: a folder; give --data folder and --data-root {name}")
    return named(FLAG, name, data_sets())
