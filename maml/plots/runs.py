"""Runs, read for drawing: what each left behind, and which are one method's with other seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maml.config import Config, settings
from maml.errors import UserError
from maml.plots.style import smooth
from maml.run import directory
from maml.run.log import Row, read_metrics


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        path: Its directory.
        config: Its configuration.
        rows: Of its metrics.jsonl.
        result: Its result.json; empty while there is none.
    """

    path: Path
    config: Config
    rows: list[Row]
    result: dict[str, Any]

    @property
    def headline(self) -> str:
        """What the names of metrics begin with that its headline is of."""
        return "" if self.config.transductive else "non_transductive_"

    def validated(self, metric: str) -> list[tuple[int, float]]:
        """Return (iteration, value) of each validation that has the metric."""
        name = self.headline + metric
        rows = [row for row in self.rows if row.get("split") == "validation" and name in row]
        return [(row["iteration"], row[name]) for row in rows]

    def trained(self, metric: str) -> list[tuple[int, float]]:
        """Return (iteration, value) of what was logged while training, smoothed."""
        rows = [row for row in self.rows if "split" not in row and metric in row]
        smoothed = smooth([row[metric] for row in rows])
        return [(row["iteration"], value) for row, value in zip(rows, smoothed, strict=True)]


def read(path: Path) -> Run:
    """Return the run in a directory.

    Raises:
        UserError: naming the file that is missing or damaged.
    """
    rows = read_metrics(path / "metrics.jsonl")
    return Run(path, directory.read_config(path), rows, directory.read_result(path))


def find(paths: Sequence[Path]) -> list[Run]:
    """Return the runs of all directories, of those in them, or in their ``trials``.

    Raises:
        UserError: naming the first that holds none.
    """
    found = []
    for path in paths:
        inside = [path] if (path / "config.yaml").is_file() else []
        inside = inside or sorted(each.parent for each in path.glob("*/config.yaml"))
        inside = inside or sorted(each.parent for each in path.glob("trials/*/config.yaml"))
        if not inside:
            raise UserError(f"{path}: no run directory, and none in it")
        found += [read(each) for each in inside]
    return found


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the settings in which the runs are not all the same, but for the seed."""
    names = dict.fromkeys(name for run in runs for name in settings(run.config) if name != "seed")
    return [name for name in names if len({getattr(run.config, name) for run in runs}) > 1]


def methods(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return runs that differ in their seed alone together, by what tells them from the others."""
    names = differing(runs)
    # Presets differ in many settings: the learner, or the preset, says it shorter.
    for alone in ("learner", "preset"):
        value = {tuple(getattr(r.config, n) for n in names): getattr(r.config, alone) for r in runs}
        if len(names) > 1 and len(set(value.values())) == len(value):
            names = [alone]
            break
    found: dict[str, list[Run]] = {}
    for run in runs:
        values = [str(getattr(run.config, name)) for name in names]
        label = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        if names in (["learner"], ["preset"]):
            label = values[0]
        found.setdefault(label or run.config.preset or run.config.learner, []).append(run)
    return found
