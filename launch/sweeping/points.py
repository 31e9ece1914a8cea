"""Which run of a folder has which values of a sweep's parameters, of a sweep or of a kept study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.sweeping.file import Point
from maml.errors import UserError

STUDY = "study.json"
"""What `launch.study` writes."""


def points_of(folder: Path) -> dict[Path, Point]:
    """Return the values of a sweep's parameters by run directory; none if it is no sweep's folder.

    Raises:
        UserError: if it is one, and cannot be read.
    """
    if (folder / STUDY).is_file():
        return {folder / trial["run"]: trial["point"] for trial in read_study(folder)["trials"]}
    if (folder / "journal.log").is_file():
        # Imported here: optuna takes a second, and most comparisons are of no sweep.
        from launch.sweeping.file import read
        from launch.sweeping.sweep import Sweep

        sweep = Sweep(folder, read(folder / "sweep.yaml"))
        return {trial.run_dir: trial.point for trial in sweep.trials()}
    return {}


def read_study(folder: Path) -> dict[str, Any]:
    """Return what a kept study's study.json says.

    Raises:
        UserError: naming it, if it is missing or damaged.
    """
    path = folder / STUDY
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for trial in said["trials"]:
            trial["run"], trial["point"], trial["git_commits"]
        said["against"], said["note"], said["hardware"]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: not a kept study") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged: {error!r}") from error
    return said
