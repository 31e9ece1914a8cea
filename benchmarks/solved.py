"""In how many episodes ``reinforce-cartpole`` is solved: a return of 475 over 100 episodes.

    python -m benchmarks.solved --json benchmarks/records/….json

Each way of acting trains by its own command: rank 0 and two observers, batched and not, and one
process alone. A row of metrics.jsonl is a mean over ten iterations, of the first episodes of their
environments. The same command goes on after what FILE has already.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.command import begun, command_line, count, write
from benchmarks.hardware import describe
from benchmarks.markdown import grid
from maml.run.directory import read_config

SOLVED = 475.0
WAYS = {
    "observers, batched": ["--strategy", "observers", "--batched-inference", "true"],
    "observers, unbatched": ["--strategy", "observers", "--batched-inference", "false"],
    "in one process": ["--strategy", "local"],
}
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]


def main() -> None:
    """Train each way with each seed; write and print what came of it."""
    own = _parse()
    record: dict[str, Any] = {
        "hardware": describe(threads=1), "iterations": own.iterations, "rows": [],
    }  # fmt: skip
    record = begun(own.json, record, ("iterations",))
    done = [(row["way"], row["seed"]) for row in record["rows"]]
    for seed in range(own.seeds):
        for way, flags in WAYS.items():
            if (way, seed) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                row = {"way": way, "seed": seed, **_train(flags, seed, own, Path(folder))}
            record["rows"].append(row)
            write(own.json, record)
            print(json.dumps({name: row[name] for name in row if name != "curve"}), flush=True)
    print(table(record))


def _train(flags: list[str], seed: int, own: argparse.Namespace, folder: Path) -> dict[str, Any]:
    launcher = [] if "local" in flags else LAUNCHER
    command = [
        *(sys.executable, *launcher, "train_maml.py", "reinforce-cartpole", *flags),
        *("--seed", str(seed), "--iterations", str(own.iterations), "--log-every", "10"),
        *("--run-dir", str(folder / "run"), "--logger", "none"),
    ]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "split" not in row]
    result = json.loads((folder / "run" / "result.json").read_text())
    # A row's episodes are those of an environment in an iteration, the mean over ten iterations.
    many = 10 * read_config(folder / "run").meta_batch_size
    episodes, curve = 0.0, []
    for row in rows:
        episodes += many * row["episodes"]
        curve.append((row["iteration"], round(episodes), row["return"]))
    solved = next((point for point in curve if point[2] >= SOLVED), None)
    return {
        "iterations": solved and solved[0], "episodes": solved and solved[1],
        "test_return": result["return"], "seconds": seconds, "curve": curve,
    }  # fmt: skip


def _parse() -> argparse.Namespace:
    parser = command_line("solved", __doc__)
    parser.add_argument("--seeds", type=count, default=1)
    parser.add_argument("--iterations", type=count, default=120, help="a multiple of 10")
    return parser.parse_args()


def table(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    head = [
        "acting",
        "seed",
        "solved after iterations",
        "episodes until then",
        "test, 100 episodes",
    ]
    cells = [
        [
            row["way"], str(row["seed"]), str(row["iterations"] or "not"),
            f"{row['episodes']:,}" if row["episodes"] else "–", f"{row['test_return']:.1f}",
        ]
        for row in record["rows"]
    ]  # fmt: skip
    return grid(head, cells)


if __name__ == "__main__":
    main()
