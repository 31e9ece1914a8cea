"""Omniglot's characters, and the published ways to divide them (Lake et al., Science 2015)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from datasets import addresses
from datasets.errors import DataError

DRAWINGS = 20

# Part of the data set, which is also the name of its archive and of its folder, to its alphabets,
# each with its number of characters: 964 of 30 alphabets, and 659 of 20.
_ALPHABETS = {
    "images_background": """
    Alphabet_of_the_Magi 20 Anglo-Saxon_Futhorc 29 Arcadian 26 Armenian 41
    Asomtavruli_(Georgian) 40 Balinese 24 Bengali 46
    Blackfoot_(Canadian_Aboriginal_Syllabics) 14 Braille 26 Burmese_(Myanmar) 34 Cyrillic 33
    Early_Aramaic 22 Futurama 26 Grantha 43 Greek 24 Gujarati 48 Hebrew 22
    Inuktitut_(Canadian_Aboriginal_Syllabics) 16 Japanese_(hiragana) 52
    Japanese_(katakana) 47 Korean 40 Latin 26 Malay_(Jawi_-_Arabic) 40
    Mkhedruli_(Georgian) 41 N_Ko 33 Ojibwe_(Canadian_Aboriginal_Syllabics) 14 Sanskrit 42
    Syriac_(Estrangelo) 23 Tagalog 17 Tifinagh 55
    """,
    "images_evaluation": """
    Angelic 20 Atemayar_Qelisayer 26 Atlantean 26 Aurek-Besh 26 Avesta 26 Ge_ez 26
    Glagolitic 45 Gurmukhi 45 Kannada 41 Keble 26 Malayalam 47 Manipuri 40 Mongolian 30
    Old_Church_Slavonic_(Cyrillic) 45 Oriya 46 Sylheti 28 Syriac_(Serto) 23 Tengwar 25
    Tibetan 42 ULOG 26
    """,
}
PARTS: dict[str, dict[str, int]] = {
    part: dict(zip(words[::2], map(int, words[1::2]), strict=True))
    for part, words in ((part, text.split()) for part, text in _ALPHABETS.items())
}

SPLITS: dict[str, dict[str, int]] = {
    "maml": {"train": 1100, "validation": 100, "test": 423},
    "mamlpp": {"train": 1150, "validation": 50, "test": 423},
    "vinyals": {"train": 1028, "validation": 172, "test": 423},
}

# A constant of the project, not the run's --seed: published rows share their test classes.
_SEED = 2017
_VINYALS_VALIDATION = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")


def class_names() -> list[str]:
    """The 1,623 classes as ``alphabet/characterNN``, in the row order of the image array.

    Background alphabets sorted by name, then evaluation alphabets sorted by name; characters in
    order in each.
    """
    return [
        f"{alphabet}/character{number:02d}"
        for alphabets in PARTS.values()
        for alphabet in sorted(alphabets)
        for number in range(1, alphabets[alphabet] + 1)
    ]


def split_classes(name: str, split: str) -> NDArray[np.int64]:
    """The classes of a split: int64 ``[n]``, sorted rows of the image array.

    ``name`` is one of

    * ``maml``: 1,200 training characters of which 100 validate, 423 test (Finn et al. 2017,
      arXiv:1703.03400). Their shuffle depends on the order of the file system, so this is a fixed
      permutation of our own.
    * ``mamlpp``: 1150 / 50 / 423 (Antoniou et al. 2019, arXiv:1810.09502), of the same
      permutation: the same test classes.
    * ``vinyals``: 1028 / 172 / 423 (Vinyals et al. 2016, arXiv:1606.04080, in the files published
      with Snell et al. 2017, arXiv:1703.05175). The test classes are the last 423 of the ordered
      list, validation is five whole alphabets. That protocol also counts each rotation as a class
      of its own (4,112 training classes); here, as in MAML, rotation is drawn per class and task.

    Raises :class:`DataError` for any other name.
    """
    if name not in SPLITS:
        raise DataError(f"--omniglot-split {name}: unknown; one of {', '.join(SPLITS)}")
    sizes, names = SPLITS[name], class_names()
    if name == "vinyals":
        test = np.arange(len(names) - sizes["test"], len(names))
        validation = np.flatnonzero([n.split("/")[0] in _VINYALS_VALIDATION for n in names])
        train = np.setdiff1d(np.arange(len(names)), np.concatenate([test, validation]))
    else:
        order = addresses.permutation(addresses.keys(_SEED, "omniglot", "split", 0), len(names))[0]
        # Test first, so that splits that differ in validation only keep the same test classes.
        test, validation, train = np.split(order, np.cumsum([sizes["test"], sizes["validation"]]))
    rows = {"train": train, "validation": validation, "test": test}[split]
    return np.sort(rows).astype(np.int64)
