"""Batched and unbatched inference for 1 to 10 observers: latencies and throughputs.

    python -m benchmarks.observers [--json FILE] [--plot FILE]

The four figures of torch's RPC reinforcement-learning benchmark, for each number of observers with
one environment each: the latency of the agent (of a forward pass and the drawing of its actions)
and of an observer (from its request to its actions), p50 and p95; the agent's throughput (requests
answered in a second of acting) and an observer's (steps that it takes in such a second). Once with
the preset's policy, two hidden layers of 40, for which a request costs more than a forward pass,
and once with two hidden layers of 2,048. Batched and unbatched runs take turns. Beside them the
ceiling: as many environments in one process, as tensors, without any request; there iterations are
timed as a whole, with their step of REINFORCE. Each run is `train_maml.py reinforce-cartpole` for
some iterations. The same command goes on after what FILE has already.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import nn
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
KEY = ("round", "observers", "policy", "way")
POLICIES = {"2 × 40": [], "2 × 2,048": ["--network", "benchmarks.observers:wide"]}


def wide(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A policy of 4.2 million parameters."""
    (inputs,) = shape
    return nn.Sequential(
        *(nn.Linear(inputs, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()),
        nn.Linear(2048, outputs),
    )


def main() -> None:
    """Measure all, in turns; write, draw and print what came of it."""
    own = _parse()
    record: dict[str, Any] = {
        "hardware": describe(threads=1), "steps": own.steps, "iterations": own.iterations,
        "rows": [],
    }  # fmt: skip
    record = begun(own.json, record, ("steps", "iterations"))
    done = {tuple(row[name] for name in KEY) for row in record["rows"]}
    turns = itertools.product(range(own.rounds), own.observers, own.policies, WAYS)
    for turn, n, policy, way in tqdm([each for each in turns if each not in done], unit="run"):
        # What else the machine does matters as much as what is measured.
        row = {"round": turn, "observers": n, "policy": policy, "way": way}
        row["load_before"] = os.getloadavg()[0]
        record["rows"].append(row | _measure(policy, way, n, own))
        write(own.json, record)
    if own.plot is not None:
        draw(record, own.plot)
    print(table(record))


def _measure(policy: str, way: str, n: int, own: argparse.Namespace) -> dict[str, Any]:
    flags = POLICIES[policy] + WAYS[way]
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
    agent = [row.get("requests_per_second", own.steps * row["tasks_per_second"]) for row in rows]
    found: dict[str, Any] = {"agent_per_second": statistics.median(agent)}
    found["steps_per_second"] = found["agent_per_second"] / n
    if way != "in process":
        for who in ("agent", "observer"):
            for figure in FIGURES:
                values = [row[f"{who}_latency_us"][figure] for row in rows]
                found[f"{who}_{figure}_us"] = statistics.median(values)
        found["flushed"] = sum(row.get("flushed", 0) for row in rows)
    return found


def _parse() -> argparse.Namespace:
    parser = command_line("observers", __doc__, plot=True)
    parser.add_argument("--observers", type=count, nargs="+", default=[1, 2, 3, 4, 6, 8, 10])
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--iterations", type=count, default=5)
    parser.add_argument("--steps", type=count, default=200)
    return parser.parse_args()


def _medians(record: dict[str, Any]) -> dict[tuple[str, int, str], dict[str, float]]:
    """Return the median over rounds of each figure, by policy, observers and way."""
    grouped: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        grouped.setdefault((row["policy"], row["observers"], row["way"]), []).append(row)
    return {
        key: {name: statistics.median(r[name] for r in rows) for name in rows[0].keys() - set(KEY)}
        for key, rows in sorted(grouped.items(), key=lambda each: _place(each[0]))
    }


def _place(key: tuple[str, int, str]) -> tuple[int, int, int]:
    policy, n, way = key
    return list(POLICIES).index(policy), n, list(WAYS).index(way)


def table(record: dict[str, Any]) -> str:
    """Return the record as Markdown: medians over rounds."""
    head = [
        "policy", "observers", "inference", "agent p50 / p95", "observer p50 / p95",
        "agent, requests/s", "observer, steps/s",
    ]  # fmt: skip
    cells = []
    for (policy, n, way), row in _medians(record).items():
        latencies = ["–", "–"]
        if way != "in process":
            latencies = [
                f"{row[f'{who}_p50_us'] / 1e3:.2f} / {row[f'{who}_p95_us'] / 1e3:.2f} ms"
                for who in ("agent", "observer")
            ]
        speeds = [f"{row[name]:,.0f}" for name in ("agent_per_second", "steps_per_second")]
        cells.append([policy, str(n), way, *latencies, *speeds])
    return grid(head, cells)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the agent's throughput and the observers' latency against their number."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatter

    medians = _medians(record)
    policies = list(dict.fromkeys(policy for policy, _, _ in medians))
    size = (10, 3.6 * len(policies))
    figure, grid = plt.subplots(len(policies), 2, figsize=size, layout="constrained", squeeze=False)
    for policy, axes in zip(policies, grid, strict=True):
        for way in WAYS:
            numbers = [n for of, n, by in medians if (of, by) == (policy, way)]
            rows = [medians[policy, n, way] for n in numbers]
            axes[0].plot(numbers, [r["agent_per_second"] for r in rows], marker="o", label=way)
            if way != "in process":
                p50, p95 = ([r[f"observer_{each}_us"] / 1e3 for r in rows] for each in FIGURES)
                (line,) = axes[1].plot(numbers, p50, marker="o", label=f"{way}, p50")
                colour = line.get_color()
                axes[1].plot(numbers, p95, linestyle=":", color=colour, label=f"{way}, p95")
        for axis, label in zip(
            axes, ("steps a second, all together", "ms for an action"), strict=True
        ):
            axis.set_title(f"hidden layers of {policy.removeprefix('2 × ')}", fontsize=10)
            axis.set_xlabel("observers, or environments")
            axis.set_ylabel(label)
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.grid(alpha=0.25)
            axis.legend(fontsize=8)
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes[0].yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))
        axes[1].set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
