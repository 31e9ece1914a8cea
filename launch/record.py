"""``python -m launch.record RUN_DIR``: keep what a table shows of a finished run.

    python -m launch.record runs/omniglot-5w1s --tasks 2000

The last checkpoint is tested again, on as many tasks as are asked for, and must score what the run
itself has written. What stays is in `launch.recorded`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.hardware import describe
from launch import recorded
from launch.check_record import differing, scores_of
from maml.config import OF_A_HOST
from maml.config.parser import Parser, whole_number
from maml.errors import UserError
from maml.run import checkpoint, directory, files
from maml.run.task_scores import NAME, read_tasks, write_tasks

PLACES = ("run_dir", "data_root", "resume")
"""Flags that name places of one machine."""
ROWS = 200
"""Training rows that stay; all of validation and test do."""


def main(arguments: list[str]) -> int:
    """Write the record of a run."""
    parser = Parser(prog="python -m launch.record", description="Keep the record of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument(
        "--tasks", type=whole_number, default=2000, help="test tasks to keep (default: 2000)"
    )
    parser.add_argument(
        "--note", default="", help="what differs from the published protocol, beside the flags"
    )
    parser.add_argument("--records", type=Path, default=recorded.RECORDS, help="where it goes")
    parser.add_argument("--data-root", help="where the data sets are (default: as in the run)")
    options = parser.parse_args(arguments)
    folder = write(options.run_dir, options.records, options.tasks, options.note, options.data_root)
    print(f"record {folder}")
    return 0


def write(run_dir: Path, records: Path, tasks: int, note: str, data_root: str | None) -> Path:
    """Write the record of ``run_dir`` below ``records``; return its folder.

    Raises:
        UserError: if the run is not finished, was not made by a commit alone, or does not score
            what it says.
    """
    config = directory.read_config(run_dir)
    status = directory.read_status(run_dir)
    if status is None or status["state"] != "finished":
        state = "has no status" if status is None else f"is {status['state']}"
        raise UserError(f"{run_dir}: it {state}; a record is of a finished run")
    starts = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))["starts"]
    for start in starts:
        if not start["git_commit"] or start["git_commit"].endswith("-dirty"):
            raise UserError(f"{run_dir}: made by {start['git_commit']}: not a commit alone")
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    last = checkpoint.load(checkpoint.last_checkpoint(run_dir))
    here = directory.config_here(run_dir, data_root, None)
    names, values = scores_of(here, last["model"], max(tasks, result["tasks"]))
    folder = records / config.preset / f"seed-{config.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder, "test", config.seed, names, values)
    wrong = differing(read_tasks(run_dir / NAME), read_tasks(folder / NAME))
    if wrong:
        raise UserError(f"{run_dir}: its last checkpoint does not score what it says: {wrong}")
    torch.save(last["model"], folder / "model.pt")
    digest = recorded.digest_of(folder / "model.pt")
    if (folder / "model.pt").stat().st_size > recorded.MODEL_BYTES:
        (folder / "model.pt").unlink()
    files.write_text(folder / "result.json", json.dumps(result, indent=1) + "\n")
    _write_config(folder, run_dir)
    _write_metrics(folder, run_dir)
    shutil.copy(run_dir / "curves.png", folder / "curves.png")
    made: dict[str, Any] = {
        "command": f"python train_maml.py {' '.join(_flags(starts[0]['command']))}",
        "starts": [
            {name: start[name] for name in ("time", "iteration", "processes", "git_commit")}
            for start in starts
        ],
        "minutes": result["seconds"] / 60,
        "hardware": describe(torch.get_num_threads()),
        "note": note,
        "model_sha256": digest,
    }
    files.write_text(folder / "record.json", json.dumps(made, indent=1) + "\n")
    return folder


def _flags(command: list[str]) -> list[str]:
    """Return a command's arguments without those that are one machine's own."""
    kept: list[str] = []
    skip = False
    for argument in command[1:]:
        name = argument.partition("=")[0].lstrip("-").replace("-", "_")
        if skip:
            skip = False
        elif argument.startswith("--") and name in {*OF_A_HOST, "run_dir"}:
            skip = "=" not in argument
        else:
            kept.append(argument)
    return kept


def _write_config(folder: Path, run_dir: Path) -> None:
    """Write the run's config.yaml, without what is one machine's own."""
    content = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    kept = {name: content[name] for name in ("versions", "git_commit")}
    config = {name: v for name, v in content["config"].items() if name not in PLACES}
    text = yaml.safe_dump({"config": config, **kept}, sort_keys=False)
    files.write_text(folder / "config.yaml", text)


def _write_metrics(folder: Path, run_dir: Path) -> None:
    """Write about `ROWS` rows of training, and all others."""
    rows = files.read_rows(run_dir / "metrics.jsonl")
    training = [row for row in rows if "split" not in row]
    every = max(1, len(training) // ROWS)
    kept = {id(row) for row in training[every - 1 :: every]}
    lines = [json.dumps(row) for row in rows if "split" in row or id(row) in kept]
    files.write_text(folder / "metrics.jsonl", "\n".join(lines) + "\n")


if __name__ == "__main__":
    from maml.processes.program import run_program

    run_program(main, sys.argv[1:])
