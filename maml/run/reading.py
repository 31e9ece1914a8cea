"""What a run left behind, and which runs are one method's with other seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maml.config.fields import Config, settings
from maml.errors import UserError
from maml.run import directory
from maml.run.files import TESTED, Scores, read_object, read_rows, read_tasks
from maml.run.log import Row


@dataclass(frozen=True)
class Run:
    """A run directory, or a record. Its other files are read when they are first asked for."""

    path: Path
    config: Config

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of metrics.jsonl."""
        return read_rows(self.path / "metrics.jsonl")

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of result.json; empty while there is none."""
        return directory.read_json(self.path / "result.json")

    @cached_property
    def made(self) -> dict[str, Any]:
        """The content of a record's record.json: how it was made."""
        return read_object(self.path / "record.json")

    @cached_property
    def scores(self) -> Scores:
        """What each test task scored: test_tasks.csv."""
        return read_tasks(self.path / TESTED)

    @property
    def headline(self) -> str:
        """What the names of metrics begin with that its headline is of."""
        return "" if self.config.transductive else "non_transductive_"


def history(rows: Sequence[Row], metric: str) -> dict[int, float]:
    """Return ``<split>/<metric>`` by iteration, the oldest first; also inf and nan."""
    split, _, name = metric.partition("/")
    of_split = (row for row in rows if row.get("split", "train") == split)
    return {
        r["iteration"]: float(r[name]) for r in of_split if isinstance(r.get(name), int | float)
    }


def read(path: Path) -> Run:
    """Return the run in a directory; a UserError names its config.yaml, if that is damaged."""
    return Run(path, directory.read_config(path))


def find(paths: Sequence[Path]) -> list[Run]:
    """Return the runs of all directories, of those in them, or in their ``trials``."""
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
    if not names:
        first = runs[0].config
        return {first.preset or first.learner: list(runs)}
    found: dict[str, list[Run]] = {}
    for run in runs:
        said = {name: str(getattr(run.config, name)) for name in names}
        label = " ".join(f"{name}={value}" for name, value in said.items())
        if names in (["learner"], ["preset"]):
            label = said[names[0]]
        found.setdefault(label, []).append(run)
    return found
