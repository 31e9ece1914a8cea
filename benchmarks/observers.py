"""Batched and unbatched inference for 1 to 10 observers: latencies and throughputs.

    python -m benchmarks.observers [--json FILE] [--plot FILE]

The four figures of torch's RPC reinforcement-learning benchmark, for each number of observers with
one environment each: the latency of the agent (of a forward pass and the drawing of its actions)
and of an observer (from its request to its actions), p50 and p95; the agent's throughput (requests
answered in a second) and an observer's (steps that it takes in a second). Batched and unbatched
runs take turns. Beside them the ceiling: as many environments in one process, as tensors, without
any request. Each run is `train_maml.py reinforce-cartpole` for some iterations.
The same command goes on after what FILE has already.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command import begun, command_line, count, write
from benchmarks.hardware import describe
from benchmarks.markdown import grid

WAYS = {
    "batched": ["--strategy", "observers", "--batched-inference", "true"],
    "unbatched": ["--strategy", "observers", "--batched-inference", "false"],
    "in process": ["--strategy", "local"],
}
FIGURES = ("p50", "p95")


def main() -> None:
    """Measure all, in turns; write, draw and print what came of it."""
    own = _parse()
    record: dict[str, Any] = {
        "hardware": describe(threads=1), "steps": own.steps, "iterations": own.iterations,
        "rows": [],
    }  # fmt: skip
    record = begun(own.json, record, ("steps", "iterations"))
    done = {(row["observers"], row["way"], row["round"]) for row in record["rows"]}
    turns = [(n, way, turn) for turn in range(own.rounds) for n in own.observers for way in WAYS]
    for n, way, turn in tqdm([each for each in turns if each not in done], unit="run"):
        # What else the machine does matters as much as what is measured.
        row = {"way": way, "observers": n, "round": turn, "load_before": os.getloadavg()[0]}
        record["rows"].append(row | _measure(way, n, own))
        write(own.json, record)
    if own.plot is not None:
        draw(record, own.plot)
    print(table(record))


def _measure(way: str, n: int, own: argparse.Namespace) -> dict[str, Any]:
    flags = WAYS[way]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n + 1}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, *([] if way == "in process" else launcher)),
            *("train_maml.py", "reinforce-cartpole", *flags, "--meta-batch-size", str(n)),
            *("--horizon", str(own.steps), "--iterations", str(1 + own.iterations)),
            *("--log-every", "1", "--test-tasks", "0", "--threads", "1", "--logger", "none"),
            *("--run-dir", f"{folder}/run"),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    # Not the first iteration, in which all is done for the first time.
    rows = [json.loads(line) for line in lines][1:]
    seconds = [n / row["tasks_per_second"] for row in rows]
    found: dict[str, Any] = {"steps_per_second": own.steps / statistics.median(seconds)}
    found["agent_per_second"] = n * found["steps_per_second"]
    if way != "in process":
        for who in ("agent", "observer"):
            for figure in FIGURES:
                values = [row[f"{who}_latency_us"][figure] for row in rows]
                found[f"{who}_{figure}_us"] = statistics.median(values)
        found["flushed"] = sum(row.get("flushed", 0) for row in rows)
    return found


def _parse() -> argparse.Namespace:
    parser = command_line("observers", __doc__, plot=True)
    parser.add_argument("--observers", type=count, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--iterations", type=count, default=3)
    parser.add_argument("--steps", type=count, default=200)
    return parser.parse_args()


def _medians(record: dict[str, Any]) -> dict[tuple[int, str], dict[str, float]]:
    """Return the median over rounds of each figure."""
    found: dict[tuple[int, str], dict[str, float]] = {}
    for row in record["rows"]:
        key = (row["observers"], row["way"])
        same = [r for r in record["rows"] if (r["observers"], r["way"]) == key]
        found[key] = {
            name: statistics.median(r[name] for r in same)
            for name in row
            if name not in ("way", "observers", "round")
        }
    return found


def table(record: dict[str, Any]) -> str:
    """Return the record as Markdown: medians over rounds."""
    head = [
        "observers", "inference", "agent p50 / p95", "observer p50 / p95", "agent, requests/s",
        "observer, steps/s",
    ]  # fmt: skip
    cells = []
    for (n, way), row in _medians(record).items():
        latencies = ["–", "–"]
        if way != "in process":
            latencies = [
                f"{row[f'{who}_p50_us'] / 1e3:.2f} / {row[f'{who}_p95_us'] / 1e3:.2f} ms"
                for who in ("agent", "observer")
            ]
        speeds = [f"{row[name]:,.0f}" for name in ("agent_per_second", "steps_per_second")]
        cells.append([str(n), way, *latencies, *speeds])
    return grid(head, cells)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the agent's throughput and the observers' latency against their number."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    medians = _medians(record)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for way in WAYS:
        numbers = sorted(n for n, of in medians if of == way)
        of_way = [medians[n, way] for n in numbers]
        axes[0].plot(numbers, [m["agent_per_second"] for m in of_way], marker="o", label=way)
        if way != "in process":
            p50 = [m["observer_p50_us"] / 1e3 for m in of_way]
            p95 = [m["observer_p95_us"] / 1e3 for m in of_way]
            (line,) = axes[1].plot(numbers, p50, marker="o", label=f"{way}, p50")
            axes[1].plot(numbers, p95, linestyle=":", color=line.get_color(), label=f"{way}, p95")
    for axis, label in zip(axes, ("steps a second, all together", "ms for an action"), strict=True):
        axis.set_xlabel("observers, or environments")
        axis.set_ylabel(label)
        axis.set_yscale("log")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
