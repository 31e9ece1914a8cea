"""``python -m maml.relog RUN_DIR``: give W&B what it misses of a run.

    wandb sync RUN_DIR/wandb/offline-run-*     # what was kept
    python -m maml.relog RUN_DIR               # what was not, as one more part of the same run
    wandb sync RUN_DIR/wandb/offline-run-*

metrics.jsonl has every row of a run, written before any logger sees it. A logger that was killed,
or left behind, misses the last of them. This command compares metrics.jsonl with the files that W&B
has kept in the run directory, and logs the rows that none of them has. The rows of ``maml.evaluate
--watch`` are added, named ``watch/…``. Given again, it finds nothing to do.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from maml.config.parser import Parser
from maml.errors import UserError
from maml.run import files
from maml.run.directory import read_config
from maml.run.log import Row, WandbSink, read_metrics, step_and_values
from maml.run.wandb_file import history


def main(arguments: list[str]) -> int:
    """Log what is missing; return the exit code."""
    parser = Parser(prog="python -m maml.relog", description="Give W&B what it misses of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    run_dir = parser.parse_args(arguments).run_dir
    config = read_config(run_dir)
    if not (run_dir / "wandb" / "run-id").is_file():
        raise UserError(f"{run_dir}: was not logged to W&B (--logger {config.logger})")
    print(f"{run_dir}: comparing its rows with its W&B files", file=sys.stderr, flush=True)
    parts = sorted((run_dir / "wandb").glob("*run-*/run-*.wandb"))
    kept = Counter(_key(row) for part in parts for row in history(part))
    rows = read_metrics(run_dir / "metrics.jsonl") + _watched(run_dir)
    missing = []
    for row in rows:
        key = _key_of(row)
        if kept[key]:
            kept[key] -= 1
        else:
            missing.append(row)
    if not missing:
        print(f"all {len(rows)} rows of {run_dir} are in its W&B files")
        return 0
    os.environ["WANDB_MODE"] = "offline"
    sink = WandbSink(run_dir, config)
    for row in missing:
        sink.write(row)
    sink.close()
    (new,) = set((run_dir / "wandb").glob("*run-*/run-*.wandb")) - set(parts)
    print(
        f"{len(missing)} of {len(rows)} rows were missing, and are in {new}; "
        f"wandb sync {new.parent} sends them"
    )
    return 0


def _watched(run_dir: Path) -> list[Row]:
    """Return the rows of evaluations beside the training, as ones of a split of their own."""
    rows = files.read_rows(run_dir / "evaluations.jsonl", mended=True)
    return [{**row, "split": f"watch/{row['split']}"} for row in rows]


def _key(logged: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a row from others: its step, and the names and values of its numbers."""
    # W&B adds names of its own, and metrics.jsonl has no pictures.
    numbers = {
        name: value
        for name, value in logged.items()
        if name != "iteration" and not name.startswith(("_", "pictures/"))
    }
    # What is not finite is a word there.
    return (logged.get("iteration"), *sorted((n, repr(float(v))) for n, v in numbers.items()))


def _key_of(row: Row) -> tuple[Any, ...]:
    step, values = step_and_values(row)
    return _key({"iteration": step, **values})


if __name__ == "__main__":
    from maml.processes.program import run_program

    run_program(main, sys.argv[1:])
