"""A trial's metric, from the files of its run directory."""

from __future__ import annotations

import json
from pathlib import Path

from launch.sweeping.file import Metric
from maml.best import best
from maml.run.directory import read_config
from maml.run.log import read_metrics


def history(run_dir: Path, name: str) -> list[float]:
    """Return all values of ``<split>/<metric>`` so far, the oldest first; also inf and nan.

    Raises:
        UserError: if metrics.jsonl is damaged.
    """
    split, _, metric = name.partition("/")
    rows = read_metrics(run_dir / "metrics.jsonl")
    values = [row.get(metric) for row in rows if row.get("split", "train") == split]
    if split == "test" and not any(_is_number(value) for value in values):
        values = [_tested(run_dir, metric)]
    return [float(value) for value in values if _is_number(value)]  # type: ignore[arg-type]


def metric_of(run_dir: Path, asked: Metric | None) -> tuple[Metric, float] | None:
    """Return what a run is ranked by, and its value; None where there is no such number.

    Unless the file of a sweep names a metric, it is the accuracy on the validation tasks, which is
    the non-transductive one of a run whose headline that is; of a policy, its return; of a
    regression, the loss. The value is the last one, finite or not, or with ``--test-model best``
    that of the model which is tested.

    Raises:
        UserError: if metrics.jsonl or config.yaml is damaged.
    """
    for metric in _usual(run_dir) if asked is None else (asked,):
        values = history(run_dir, metric.name)
        if values:
            tested = _of_tested(run_dir, metric.name)
            return metric, values[-1] if tested is None else tested
    return None


def _usual(run_dir: Path) -> tuple[Metric, ...]:
    transductive = True
    if (run_dir / "config.yaml").exists():
        transductive = read_config(run_dir).transductive
    prefix = "validation/" if transductive else "validation/non_transductive_"
    return (
        Metric(f"{prefix}accuracy", "maximize"),
        Metric("validation/return", "maximize"),
        Metric(f"{prefix}loss", "minimize"),
    )


def _of_tested(run_dir: Path, name: str) -> float | None:
    """Return a validation's ``name`` for the model that ``--test-model best`` tests.

    None if the run tests its last model, or is of a program without a config.yaml.
    """
    split, _, metric = name.partition("/")
    if split != "validation" or not (run_dir / "config.yaml").exists():
        return None
    config = read_config(run_dir)
    if config.test_model != "best":
        return None
    rows = {
        row["iteration"]: row
        for row in read_metrics(run_dir / "metrics.jsonl")
        if row.get("split") == "validation"
    }
    chosen = best(run_dir, rows, transductive=config.transductive)
    value = rows[chosen[0]].get(metric) if chosen else None
    return float(value) if _is_number(value) else None  # type: ignore[arg-type]


def _tested(run_dir: Path, metric: str) -> object:
    """Return a test metric of result.json; its bare names there are those of the headline."""
    try:
        result = json.loads((run_dir / "result.json").read_text())
    except (OSError, ValueError):
        return None
    return result.get(f"transductive_{metric}", result.get(metric))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
