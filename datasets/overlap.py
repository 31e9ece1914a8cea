"""Classes that two splits have in common: what is tested on them says nothing about new ones.

The data sets of this folder have none. A user's own function may have forgotten its ``split``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from datasets.episodes import Episodes, ImageArray
from datasets.registry import FLAG
from datasets.spelling import is_theirs


def shared_classes(data: str, splits: Sequence[Episodes], new: str = "classes") -> str:
    """A warning where a split of a user's own data has classes of one before it, or "".

    They have the very same images, or else the same name. ``new`` is what a test ought to be of,
    for the message.
    """
    if not is_theirs(data):
        return ""
    said = []
    # The split where an image digest, or a name, was met first.
    met: dict[bytes | str, str] = {}
    for episodes, known in zip(splits, _digests(splits), strict=True):
        # A user's own episodes may tell names or images alone.
        count = max(len(known), len(episodes.class_names or ()))
        digests = known or [b""] * count
        names = _names(episodes, count)
        if len(names) != len(digests):
            continue
        found: Counter[tuple[str, str]] = Counter()
        for digest, name in zip(digests, names, strict=True):
            if digest in met:
                found["images", met[digest]] += 1
            elif name in met:
                found["name", met[name]] += 1
        said += [
            f"{count} of {len(digests)} {episodes.split} classes have the same {what} as a class "
            f"of {earlier}"
            for (what, earlier), count in found.items()
        ]
        marks: list[bytes | str] = [*filter(None, digests), *filter(None, names)]
        met = dict.fromkeys(marks, episodes.split) | met
    if not said:
        return ""
    says_nothing = f"the accuracy on them says nothing about new {new}"
    return f"warning: {FLAG} {data}: {', and '.join(said)}: {says_nothing}"


def _names(episodes: Episodes, classes: int) -> list[str]:
    """The classes' names, "" for one without: a number is a place in a list, and no name."""
    names = episodes.class_names or [""] * classes
    return ["" if name.isdecimal() else name for name in names]


def _digests(splits: Sequence[Episodes]) -> Iterator[list[bytes]]:
    """Of each split, a digest of each class's images; b"" where no other class can have the same.

    A class is read whole only if its first image is that of another class: an array may be large,
    and mapped.
    """
    found = [episodes.class_rows() for episodes in splits]
    first = [[_digest(part.images, rows[:1]) for rows in part.rows] for part in found]
    often = Counter(digest for of_split in first for digest in of_split)
    for part, of_split in zip(found, first, strict=True):
        yield [
            _digest(part.images, rows) if often[digest] > 1 else b""
            for rows, digest in zip(part.rows, of_split, strict=True)
        ]


def _digest(images: ImageArray, rows: NDArray[np.int64]) -> bytes:
    pixels = np.asarray(images[rows])
    found = hashlib.blake2b(str(pixels.shape).encode(), digest_size=16)
    found.update(pixels.tobytes())
    return found.digest()
