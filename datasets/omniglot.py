"""Omniglot: 1,623 handwritten characters, 20 drawings each (Lake et al., Science 2015).

Locate, verify, decode once, map: :func:`open_images` finds the archives or downloads them, checks
their contents, and keeps a decoded copy in the cache that every process maps.
"""

from __future__ import annotations

import hashlib
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from datasets.cache import Mapped, cached, map_array
from datasets.episodes import ImageClasses
from datasets.errors import DataError
from datasets.flags import flag
from datasets.omniglot_alphabets import DRAWINGS, PARTS, class_names
from datasets.omniglot_source import SIZE, Part
from datasets.omniglot_splits import SPLITS, split_classes
from datasets.paths import to_download_into
from datasets.whole import written

COMPONENTS = {
    "omniglot": {
        "help": "1,623 handwritten characters, 20 drawings each",
        "episodes": "open_classes",
        "classes": "list_classes",
        "examples": "datasets.drawings:open_omniglot",
        "image_shape": (1, 28, 28),
        "ink": True,
    }
}


class Flags:
    """What the components of this file read, and no other."""

    omniglot_split: Literal["maml", "mamlpp", "vinyals"] = flag(
        "maml",
        "Which named split of Omniglot's classes: 1100/100/423, 1150/50/423 or 1028/172/423.",
    )


__all__ = ["SPLITS", "class_names", "open_classes", "open_images", "split_classes"]

CARRIED = "omniglot-28x28.npy"

# Part of the fingerprint: raise it when the decoder's output changes, and old caches are no longer
# found.
_DECODER = "grey-lanczos-inverted-1"
_DOWNLOAD_TIMEOUT_S = 30.0


def open_classes(
    split: str, *, data_root: Path, omniglot_split: str = "maml", **_unused: object
) -> ImageClasses:
    """The characters of a split, rotated per class and task.

    In all splits, as MAML's code does; where the classes are divided as by MAML++'s, in training
    alone, as its code does. Raises :class:`DataError` as :func:`open_images` and
    :func:`split_classes` do.
    """
    classes = split_classes(omniglot_split, split)
    rotate = omniglot_split != "mamlpp" or split == "train"
    return ImageClasses.of_equal_size(open_images(data_root), classes, rotate=rotate)


def list_classes(*, omniglot_split: str = "maml", **_unused: object) -> dict[str, list[str]]:
    """The characters of each split, as ``alphabet/characterNN``."""
    names = class_names()
    return {
        split: [names[row] for row in split_classes(omniglot_split, split)]
        for split in SPLITS[omniglot_split]
    }


def open_images(data_root: Path) -> Mapped:
    """All drawings, read-only: uint8 ``[1623, 20, 28, 28]``, ink 255 on paper 0.

    The rows are in the order of :func:`class_names`. Under ``data_root/omniglot`` it takes the
    archives ``images_background.zip`` and ``images_evaluation.zip``, or folders of the same names,
    or else the already decoded ``omniglot-28x28.npy``; failing all, it downloads the archives
    there. Raises :class:`DataError`, in one line, if there is no data, or if it is damaged or
    incomplete.
    """
    return open_parts(Path(data_root).expanduser() / "omniglot", PARTS)


def open_parts(folder: Path, parts: Mapping[str, Mapping[str, int]]) -> Mapped:
    """:func:`open_images` for any table of parts and alphabets."""
    shape = (sum(sum(alphabets.values()) for alphabets in parts.values()), DRAWINGS, *SIZE)
    sources = {name: _local(folder, name) for name in parts}
    carried = folder / CARRIED
    if None in sources.values() and carried.is_file():
        return _checked_polarity(carried, map_array(carried, shape))
    found = [Part(path or _download(folder, name), parts[name]) for name, path in sources.items()]
    prints = "".join(part.fingerprint() for part in found)
    fingerprint = hashlib.blake2b(f"{_DECODER}{prints}".encode(), digest_size=8).hexdigest()
    return cached(
        f"omniglot/28x28-{fingerprint}.npy",
        shape,
        lambda: (character[None] for part in found for character in part.characters()),
        title="decoding Omniglot",
    )


def _local(folder: Path, name: str) -> Path | None:
    for candidate in (folder / f"{name}.zip", folder / name):
        if candidate.exists():
            return candidate
    return None


def _checked_polarity(path: Path, images: Mapped) -> Mapped:
    """``images``, unless paper is bright: ink and paper are swapped then, which no shape shows."""
    if float(images[:2].mean()) > 127:
        raise DataError(f"{path}: paper is bright; it must hold ink as 255 on paper 0")
    return images


def _download(folder: Path, name: str) -> Path:
    """Fetch an official archive, checked by its MD5, into ``folder``; many processes may call."""
    from torchvision.datasets import Omniglot

    target = folder / f"{name}.zip"
    url = f"{Omniglot.download_url_prefix}/{target.name}"
    try:
        with to_download_into(folder, target.with_name(f"{target.name}.lock")):
            if not target.exists():
                _fetch(url, target, Omniglot.zips_md5[name])
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{target}: not found, and the download failed ({reason}); put images_background.zip "
            f"and images_evaluation.zip into {folder}, or point --data-root or $MAML_DATA at a "
            "folder that has omniglot/, or connect this machine to the network so that it "
            "downloads; the maml-glyphs-* presets need no data"
        ) from error
    return target


def _fetch(url: str, target: Path, md5: str) -> None:
    """Download ``url``; ``target`` appears only when it is whole and its MD5 is right."""
    print(f"downloading {url} to {target}", file=sys.stderr, flush=True)
    digest = hashlib.md5(usedforsecurity=False)
    with (
        written(target) as temporary,
        urllib.request.urlopen(url, timeout=_DOWNLOAD_TIMEOUT_S) as response,
        open(temporary, "wb") as file,
    ):
        while block := response.read(1 << 20):
            digest.update(block)
            file.write(block)
        if digest.hexdigest() != md5:
            raise ValueError(f"{url} has MD5 {digest.hexdigest()} instead of {md5}")
