"""Classes that two splits have in common: what is tested on them says nothing about new ones.

The data sets of this folder have none. A user's own function may have forgotten its ``split``.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

from datasets.episodes import Episodes
from datasets.registry import FLAG
from datasets.spelling import is_theirs


def shared_classes(data: str, splits: Sequence[Episodes], new: str = "classes") -> str:
    """A warning where a split of a user's own data has classes of one before it, or "".

    ``new`` is what a test ought to be of, for the message.
    """
    if not is_theirs(data):
        return ""
    said: list[str] = []
    met: dict[bytes, str] = {}  # the split where images were met first, by their digest
    for episodes in splits:
        digests = [hashlib.blake2b(some.tobytes()).digest() for some in episodes.samples()]
        found = Counter(met[digest] for digest in digests if digest in met)
        said += [
            f"{n} of {len(digests)} {episodes.split} classes have the same images as a class of "
            f"{earlier}"
            for earlier, n in found.items()
        ]
        met = dict.fromkeys(digests, episodes.split) | met
    if not said:
        return ""
    says_nothing = f"the accuracy on them says nothing about new {new}"
    return f"warning: {FLAG} {data}: {', and '.join(said)}: {says_nothing}"
