"""A run's provenance: package versions, this repository's commit, a user's own files."""

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from datasets import accelerator
from maml.config import Config, registry

PACKAGES = ("torch", "torchvision", "torchopt", "learn2learn", "numpy", "wandb")


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def machine() -> dict[str, Any]:
    """Return this machine's ``processor``, ``cores`` and ``gpu`` (a name or None)."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = names[0].split(":")[1].strip() if names else processor
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "gpu": accelerator.name(),
    }


def describe(threads: int) -> dict[str, Any]:
    """Return what a measurement ran on: processor, cores, load, versions, commit and date."""
    return {
        **machine(),
        "threads": threads,
        "load_before": os.getloadavg()[0],
        "versions": versions(),
        "git_commit": git_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def git_commit() -> str | None:
    """Return this repository's commit, with ``-dirty`` if files differ from it.

    Return None if this file is in no repository, or only below one that does not track it.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10)

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        dirty = git("status", "--porcelain", "--untracked-files=no").strip()
        return git("rev-parse", "HEAD").strip() + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None


def own_files(config: Config) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of the files of a user's own components: ``{kind: {module: digest}}``."""
    digests: dict[str, dict[str, str]] = {}
    for kind, files in registry.files_of_own(config).items():
        digests[kind] = {}
        for module, file in files.items():
            # A module in an archive has no file.
            with contextlib.suppress(OSError):
                digests[kind][module] = digest_of(Path(file))
    return digests


def other_files(config: Config, recorded: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return "FILE … has changed" for each of a user's own files that differs from ``recorded``."""
    now, files = own_files(config), registry.files_of_own(config)
    return [
        f"{_shown(files.get(kind, {}).get(module, module))} (--{kind} {getattr(config, kind)}) "
        "has changed"
        for kind, digests in recorded.items()
        for module, digest in digests.items()
        if now.get(kind, {}).get(module) != digest
    ]


def warn_of_edits(config: Config, saved: Mapping[str, Any], said: set[str] | None = None) -> None:
    """Warn of a user's own files that changed since a checkpoint was saved, unless ``said``."""
    # Compare only components that both use: a different component is not an edited file.
    then = saved.get("config", {})
    same = {
        kind: digests
        for kind, digests in saved.get("own_files", {}).items()
        if then.get(kind, getattr(config, kind)) == getattr(config, kind)
    }
    said = set() if said is None else said
    for line in other_files(config, same):
        if line not in said:
            said.add(line)
            since = "since this checkpoint was saved: results may differ"
            print(f"warning: {line} {since}", file=sys.stderr, flush=True)


def _shown(file: str) -> str:
    """Return a file's path, relative to the current folder if the file is below it."""
    with contextlib.suppress(ValueError, OSError):
        return str(Path(file).relative_to(Path.cwd()))
    return file


def digest_of(path: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
