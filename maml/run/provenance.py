"""What a run was made with: package versions, this repository's commit, a user's own files."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from importlib import metadata
from pathlib import Path

from maml.config import Config, registry

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


def own_files(config: Config) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of the files of a user's own components: ``{kind: {module: digest}}``.

    They are in no commit of this repository. What they import in turn is not looked at.
    """
    found: dict[str, dict[str, str]] = {}
    for kind, files in registry.files_of_own(config).items():
        found[kind] = {}
        for module, file in files.items():
            # Of a module in an archive there is no file.
            with contextlib.suppress(OSError):
                found[kind][module] = digest_of(Path(file))
    return found


def other_files(config: Config, recorded: dict[str, dict[str, str]]) -> list[str]:
    """Say of each of a user's own files that is not what it was when ``recorded``."""
    now = own_files(config)
    return [
        f"--{kind} {getattr(config, kind)}: the file of {module} is not what it was"
        for kind, files in recorded.items()
        for module, digest in files.items()
        if now.get(kind, {}).get(module) != digest
    ]


def digest_of(path: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
