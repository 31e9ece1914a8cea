"""CIFAR-FS and FC100: few-shot tasks from CIFAR-100's 100 classes of 600 images, 32x32.

Both take CIFAR-100 as torchvision finds and downloads it, under ``<data-root>/cifar100``. The
images of its two parts are put together by class; the cache keeps that.
"""

from __future__ import annotations

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
        "classes": "list_classes",
        "images_of": "cifar100",
        "image_shape": (3, 32, 32),
    },
    "fc100": {
        "like": "cifarfs",
        "help": "CIFAR-100 in colour, 60/20/20 classes that have no superclass in common",
    },
}

_CIFAR = "cifar100"
# Part of the cache's file name: raise it when the order of the images changes.
_ORDER = "v1"

# Krizhevsky 2009, section 3.1: superclasses, with five classes each.
SUPERCLASSES: dict[str, str] = {
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}
# A class's label is its place here.
CLASSES: tuple[str, ...] = tuple(sorted(" ".join(SUPERCLASSES.values()).split()))


# What is neither validated nor tested on is trained on.
HELD_OUT: dict[str, dict[str, str]] = {
    # Bertinetto et al. 2019, arXiv:1805.08136, the files splits/bertinetto/*.txt.
    "cifarfs": {
        "validation": "beaver beetle butterfly camel cattle crab crocodile flatfish lamp "
        "maple_tree motorcycle otter sea shark television tractor",
        "test": "baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy rocket rose "
        "snail sweet_pepper table telephone wardrobe whale woman worm",
    },
    # Oreshkin et al. 2018, arXiv:1805.10123, supplementary material: whole superclasses.
    "fc100": {
        "validation": "large_carnivores large_omnivores_and_herbivores non-insect_invertebrates "
        "small_mammals",
        "test": "aquatic_mammals insects medium_mammals people",
    },
}


def labels(name: str, split: str) -> NDArray[np.int64]:
    """CIFAR-100's labels of a split of "cifarfs" or "fc100", sorted: int64 ``[c]``."""
    held_out = {
        part: {each for word in text.split() for each in SUPERCLASSES.get(word, word).split()}
        for part, text in HELD_OUT[name].items()
    }
    of_split = held_out.get(split, {*CLASSES}.difference(*held_out.values()))
    return np.array([label for label, each in enumerate(CLASSES) if each in of_split])


def open_classes(split: str, *, name: str, data_root: Path, **_unused: object) -> ImageClasses:
    """The classes of a split of "cifarfs" or "fc100", in the order of their names, not rotated.

    Raises :class:`DataError`, in one line, if CIFAR-100's files are missing or damaged and cannot
    be downloaded.
    """
    return ImageClasses.of_equal_size(open_images(data_root), labels(name, split), rotate=False)


def list_classes(*, name: str, **_unused: object) -> dict[str, list[str]]:
    """The classes of each split of "cifarfs" or "fc100", as CIFAR-100 calls them."""
    return {
        split: [CLASSES[label] for label in labels(name, split)]
        for split in ("train", *HELD_OUT[name])
    }


def open_images(data_root: Path) -> Mapped:
    """CIFAR-100 by class, read-only: uint8 ``[100, 600, 32, 32, 3]``, RGB.

    Of each class torchvision's training images come first, then its test images, in its order.
    Raises :class:`DataError` as :func:`open_classes` does.
    """
    source = SOURCES[_CIFAR]
    per_class = sum(source.sizes.values()) // source.classes
    return cached(
        f"{_CIFAR}/{_ORDER}-by-class.npy",
        (source.classes, per_class, *source.shape),
        lambda: iter([_by_class(Path(data_root).expanduser() / _CIFAR)]),
        title="reading CIFAR-100 by class",
    )


def _by_class(folder: Path) -> NDArray[np.uint8]:
    parts = [read_part(_CIFAR, part, folder) for part in ("train", "test")]
    images, of_class = (np.concatenate(both) for both in zip(*parts, strict=True))
    ordered = images[np.argsort(of_class, kind="stable")]
    return ordered.reshape(SOURCES[_CIFAR].classes, -1, *images.shape[1:])
