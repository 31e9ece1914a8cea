"""A trial's metric, from the files of its run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maml.best import best
from maml.run.directory import read_config
from maml.run.log import read_metrics


def history(run_dir: Path, metric: str) -> dict[int, float]:
    """Return the values of ``<split>/<metric>`` by iteration, the oldest first; also inf and nan.

    Raises:
        UserError: if metrics.jsonl is damaged.
    """
    split, _, name = metric.partition("/")
    rows: list[dict[str, Any]] = read_metrics(run_dir / "metrics.jsonl")
    of_split = (row for row in rows if row.get("split", "train") == split)
    return {
        r["iteration"]: float(r[name]) for r in of_split if isinstance(r.get(name), int | float)
    }


def value_of_run(run_dir: Path, metric: str) -> float | None:
    """Return the value that a run is ranked by; None where there is no such number.

    It is the last one, finite or not, or of a validation with ``--test-model best`` that of the
    model which is tested.

    Raises:
        UserError: if metrics.jsonl or config.yaml is damaged.
    """
    values = history(run_dir, metric)
    if metric.startswith("validation/") and (run_dir / "config.yaml").exists():
        config = read_config(run_dir)
        if config.test_model == "best":
            chosen = best(run_dir, values, transductive=config.transductive)
            values = {chosen[0]: values[chosen[0]]} if chosen else values
    return list(values.values())[-1] if values else None
