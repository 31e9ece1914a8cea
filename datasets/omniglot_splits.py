"""The published ways to divide Omniglot's characters into training, validation and test."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from datasets import addresses
from datasets.errors import DataError
from datasets.omniglot_alphabets import class_names

SPLITS: dict[str, dict[str, int]] = {
    "maml": {"train": 1100, "validation": 100, "test": 423},
    "mamlpp": {"train": 1150, "validation": 50, "test": 423},
    "vinyals": {"train": 1028, "validation": 172, "test": 423},
}

# A constant of the project, not the run's --seed: published rows share their test classes.
_SEED = 2017
_VINYALS_VALIDATION = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")


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

    ``split`` is ``train``, ``validation`` or ``test``. Raises :class:`DataError` for any other
    name.
    """
    if name not in SPLITS:
        raise DataError(f"--omniglot-split {name}: unknown; one of {', '.join(SPLITS)}")
    sizes = SPLITS[name]
    if split not in sizes:
        raise DataError(f"--split {split}: unknown; one of {', '.join(sizes)}")
    names = class_names()
    if name == "vinyals":
        test = np.arange(len(names) - sizes["test"], len(names))
        validation = np.flatnonzero([n.split("/")[0] in _VINYALS_VALIDATION for n in names])
        train = np.setdiff1d(np.arange(len(names)), np.concatenate([test, validation]))
        rows = {"train": train, "validation": validation, "test": test}[split]
    else:
        order = addresses.permutation(addresses.keys(_SEED, "omniglot", "split", 0), len(names))[0]
        # Test first, so that splits that differ in validation only keep the same test classes.
        starts = {
            "test": 0,
            "validation": sizes["test"],
            "train": sizes["test"] + sizes["validation"],
        }
        rows = order[starts[split] : starts[split] + sizes[split]]
    return np.sort(rows).astype(np.int64)
