"""Which data sets there are, and what they say of themselves. Nothing here imports torch."""

import functools
from dataclasses import dataclass
from pathlib import Path

from datasets.components import Component, is_theirs, scan, unknown
from datasets.errors import DataError
from datasets.theirs import load_theirs

FLAG = "--data"


@dataclass(frozen=True)
class DataSet(Component):
    """A data set's facts.

    Attributes:
        episodes: The function of its module that opens a split's few-shot tasks; None: it has none.
        examples: The same for ordinary classification.
        image_shape: (C, H, W) of its images, for those who build a network before, or without,
            opening it; None if it has none. Where it depends on the fields that it reads: the
            function of its module that tells it, called with them.
        ink: Whether its images are ink (255) on paper (0): for who learned from them, a picture
            with bright paper is inverted.
        classifies: Whether its targets are classes; else numbers, which are regressed.
        environments: The function that opens a split's tasks to act in; None: it has none.
        own_images: Whether ``--data-root`` says which images there are, a user's own.
        classes: The function that lists each split's classes without opening any; None: it has
            none.
        point: How many numbers an example has that is no image, and how many are answered to it.
    """

    episodes: str | None = None
    examples: str | None = None
    image_shape: tuple[int, int, int] | str | None = None
    ink: bool = False
    classifies: bool = True
    environments: str | None = None
    own_images: bool = False
    classes: str | None = None
    point: tuple[int, int] = (1, 1)


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
    if name not in data_sets():
        if Path(name).is_dir():
            raise DataError(f"{FLAG} {name}: a folder; give --data folder and --data-root {name}")
        raise DataError(unknown(FLAG, name, data_sets()))
    return data_sets()[name]
