"""Classes that two splits have in common: what is tested on them says nothing about new ones.

The data sets of this folder have none. A user's own function may have forgotten its ``split``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from datasets.episodes import Episodes
from datasets.registry import FLAG
from datasets.spelling import is_theirs

_COMPARED = 8
"""Images of a class that are read: an array may be large, and mapped."""


def shared_classes(data: str, splits: Sequence[Episodes], new: str = "classes") -> str:
    """A warning where a split of a user's own data has classes of one before it, or "".

    They have the same images, or else the same name. ``new`` is what a test ought to be of, for
    the message.
    """
    if not is_theirs(data):
        return ""
    said = []
    # The split where images, by their digest, or a name, were met first.
    met: dict[bytes | str, str] = {}
    for episodes in splits:
        digests, names = _digests(episodes), _names(episodes)
        # A user's own episodes may tell names or images alone.
        count = max(len(digests), len(names))
        marks = list(zip(digests or [b""] * count, names or [""] * count, strict=False))
        found: Counter[tuple[str, str]] = Counter()
        for digest, name in marks:
            if digest in met:
                found["images", met[digest]] += 1
            elif name in met:
                found["name", met[name]] += 1
        said += [
            f"{n} of {count} {episodes.split} classes have the same {what} as a class of {earlier}"
            for (what, earlier), n in found.items()
        ]
        met = {mark: episodes.split for pair in marks for mark in pair if mark} | met
    if not said:
        return ""
    says_nothing = f"the accuracy on them says nothing about new {new}"
    return f"warning: {FLAG} {data}: {', and '.join(said)}: {says_nothing}"


def _names(episodes: Episodes) -> list[str]:
    """The classes' names, "" for one without: a number is a place in a list, and no name."""
    return ["" if name.isdecimal() else name for name in episodes.class_names or ()]


def _digests(episodes: Episodes) -> list[bytes]:
    """Of each class, a digest of some of its images and of their number."""
    images, classes = episodes.class_rows()
    found = []
    for rows in classes:
        some = rows[np.linspace(0, len(rows) - 1, _COMPARED).astype(int)]
        pixels = np.asarray(images[some])
        digest = hashlib.blake2b(f"{len(rows)} {pixels.shape}".encode(), digest_size=16)
        digest.update(pixels.tobytes())
        found.append(digest.digest())
    return found
