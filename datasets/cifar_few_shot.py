"""CIFAR-FS and FC100: few-shot tasks of CIFAR-100, which the cache keeps by class."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datasets.cache import Mapped, cached
from datasets.episodes import ImageClasses
from datasets.torchvision_sets import SOURCES, read_part

COMPONENTS = {
    "cifarfs": {
        "help": "CIFAR-100 in colour, 600 images of each class, 64/16/20 classes",
        "episodes": "open_classes",
        "image_shape": (3, 32, 32),
    },
    "fc100": {
        "like": "cifarfs",
        "help": "CIFAR-100 in colour, 60/20/20 classes that have no superclass in common",
    },
}

_CIFAR = "cifar100"

# In the order of their labels.
_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain "
    "mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain "
    "plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone "
    "television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
CLASSES = _NAMES.split()
# All other classes are for training.
HELD_OUT: dict[str, dict[str, str]] = {
    # Bertinetto et al. 2019, arXiv:1805.08136, the files splits/bertinetto/*.txt.
    "cifarfs": {
        "validation": "beaver beetle butterfly camel cattle crab crocodile flatfish lamp "
        "maple_tree motorcycle otter sea shark television tractor",
        "test": "baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy rocket rose "
        "snail sweet_pepper table telephone wardrobe whale woman worm",
    },
    # Oreshkin et al. 2018, arXiv:1805.10123, supplementary material: four superclasses each.
    "fc100": {
        "validation": "bear leopard lion tiger wolf camel cattle chimpanzee elephant kangaroo "
        "crab lobster snail spider worm hamster mouse rabbit shrew squirrel",
        "test": "beaver dolphin otter seal whale bee beetle butterfly caterpillar "
        "cockroach fox porcupine possum raccoon skunk baby boy girl man woman",
    },
}


def labels(name: str, split: str) -> NDArray[np.int64]:
    """Return CIFAR-100's labels of a split of "cifarfs" or "fc100", sorted: int64 ``[c]``."""
    held_out = {part: frozenset(text.split()) for part, text in HELD_OUT[name].items()}
    of_split = held_out.get(split, {*CLASSES}.difference(*held_out.values()))
    return np.array([label for label, each in enumerate(CLASSES) if each in of_split])


def open_classes(split: str, *, name: str, data_root: Path, **_unused: object) -> ImageClasses:
    """Return the classes of a split of "cifarfs" or "fc100", in order of names, not rotated."""
    rows = labels(name, split)
    names = [CLASSES[label] for label in rows]
    return ImageClasses.of_equal_size(open_images(data_root), rows, rotate=False, names=names)


def open_images(data_root: Path) -> Mapped:
    """Map CIFAR-100 by class, training images first: uint8 ``[100, 600, 32, 32, 3]``, read-only."""
    source = SOURCES[_CIFAR]
    shape = (source.classes, sum(source.sizes.values()) // source.classes, *source.shape)

    def by_class() -> Iterator[NDArray[np.uint8]]:
        parts = [read_part(_CIFAR, part, data_root) for part in ("train", "test")]
        images, of_class = (np.concatenate(both) for both in zip(*parts, strict=True))
        yield images[np.argsort(of_class, kind="stable")].reshape(shape)

    # v1: raise it when the order of the images changes.
    return cached(f"{_CIFAR}/v1-by-class.npy", shape, by_class, "reading CIFAR-100 by class")
