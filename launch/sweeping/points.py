"""Which run of a folder has which values of a sweep's parameters, of a sweep or of a kept study."""

from __future__ import annotations

import json
from pathlib import Path

from launch.sweeping.file import Point

STUDY = "study.json"
"""What `launch.study` writes."""


def points_of(folder: Path) -> dict[Path, Point]:
    """Return the values of a sweep's parameters by run directory; none if it is no sweep's folder.

    Raises:
        UserError: if it is one, and cannot be read.
    """
    if (folder / STUDY).is_file():
        trials = json.loads((folder / STUDY).read_text(encoding="utf-8"))["trials"]
        return {folder / trial["run"]: trial["point"] for trial in trials}
    if (folder / "journal.log").is_file():
        # Imported here: optuna takes a second, and most comparisons are of no sweep.
        from launch.sweeping.file import read
        from launch.sweeping.sweep import Sweep

        sweep = Sweep(folder, read(folder / "sweep.yaml"))
        return {trial.run_dir: trial.point for trial in sweep.trials()}
    return {}
