"""Write sweeps' files for tests."""

from pathlib import Path
from typing import Any

import yaml


def written(folder: Path, **said: Any) -> Path:
    """Write a sweep's file; keys that are not ``said`` describe a grid of small trainings."""
    usual = {
        "method": "grid",
        "metric": {"name": "validation/accuracy", "goal": "maximize"},
        "program": "train_maml.py",
        "command": ["${program}", "maml-glyphs-5way-1shot", "${args}"],
    }
    folder.mkdir(exist_ok=True)
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(usual | said, sort_keys=False))
    return path
