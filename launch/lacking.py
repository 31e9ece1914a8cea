"""Print what the Python that runs this lacks of the packages that a file asks for, in one line.

    python launch/lacking.py pyproject.toml requirements.txt

Of pyproject.toml: the dependencies, which have least versions. Of requirements.txt: every line.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

SHOWN = 4


def main(paths: list[str]) -> str:
    """Return the packages that are missing or of another version; "" if none is."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # a package of the list brings it along
        return "packaging"
    lacking = []
    for line in (line for path in paths for line in _lines(Path(path))):
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{wanted.name}{wanted.specifier}")
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            lacking.append(f"{wanted.name}{wanted.specifier} (it has {version})")
    more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
    return ", ".join(lacking[:SHOWN]) + more


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return list(tomllib.loads(text)["project"]["dependencies"])
    # Without comments, and without what is for pip alone.
    lines = (line.partition("#")[0].partition(" --")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


if __name__ == "__main__":
    print(main(sys.argv[1:]))
