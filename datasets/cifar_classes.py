"""The classes of CIFAR-100, and which of them CIFAR-FS and FC100 train, validate and test on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _of(*superclasses: str) -> frozenset[str]:
    return _names(" ".join(SUPERCLASSES[name] for name in superclasses))


# What is neither validated nor tested on is trained on.
HELD_OUT: dict[str, dict[str, frozenset[str]]] = {
    # Bertinetto et al. 2019, arXiv:1805.08136, the files splits/bertinetto/*.txt.
    "cifarfs": {
        "validation": _names(
            "beaver beetle butterfly camel cattle crab crocodile flatfish lamp maple_tree "
            "motorcycle otter sea shark television tractor"
        ),
        "test": _names(
            "baby bed bicycle chimpanzee fox leopard man pickup_truck plain poppy rocket rose "
            "snail sweet_pepper table telephone wardrobe whale woman worm"
        ),
    },
    # Oreshkin et al. 2018, arXiv:1805.10123, supplementary material: whole superclasses.
    "fc100": {
        "validation": _of(
            "large_carnivores",
            "large_omnivores_and_herbivores",
            "non-insect_invertebrates",
            "small_mammals",
        ),
        "test": _of("aquatic_mammals", "insects", "medium_mammals", "people"),
    },
}


def labels(name: str, split: str) -> NDArray[np.int64]:
    """CIFAR-100's labels of a split of "cifarfs" or "fc100", sorted: int64 ``[c]``.

    ``split`` is "train", "validation" or "test".
    """
    held_out = HELD_OUT[name]
    of_split = held_out.get(split, frozenset(CLASSES).difference(*held_out.values()))
    return np.array([label for label, each in enumerate(CLASSES) if each in of_split])
