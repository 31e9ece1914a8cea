"""What a run was made with: package versions, and the commit of this repository."""

from __future__ import annotations

import contextlib
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "torchvision", "torchopt", "learn2learn", "numpy", "wandb")


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git_commit() -> str | None:
    """Return this repository's commit, with ``-dirty`` if files differ from it."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
        dirty = subprocess.run(
            ["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")
