"""Tasks per second, bytes a step and the server's time against workers, every strategy.

    python -m benchmarks.scaling --json scaling.json --plot scaling.png
    python -m benchmarks.scaling --topologies allreduce "rpc chunk" --workers 1 2 --rounds 5

Every measurement is one run of ``train_maml.py`` under torchrun with one computing thread a
process, as a user starts it; the rounds interleave. A worker is a process that computes: a
parameter server is one process more. ``local`` is the same run without a launcher, and ``apart``
as many of those at once, each with its part of the tasks and no word between them: the most that
the machine gives to any topology. Beyond the cores of the machine, workers share them: what is
seen there is the overhead, not speed.

``calm`` is the rate that a tenth of the pieces of a run, of two iterations each, exceed. On a
shared machine a core's other hardware thread may belong to a neighbour, for seconds at a time, and
a step that waits for all workers is slow when any of their cores is; this is what is left when
none is. It also leaves out what a run itself does in few steps: the medians have that.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.command import command_line, count, write
from benchmarks.hardware import describe
from benchmarks.markdown import grid
from maml.run.log import read_metrics

_SERVER = ["--strategy", "param-server"]
TOPOLOGIES: dict[str, list[str]] = {
    "local": ["--strategy", "local"],
    "apart": ["--strategy", "local"],
    "rpc exclusive": ["--strategy", "rpc", "--partition", "exclusive"],
    "rpc chunk": ["--strategy", "rpc", "--partition", "chunk"],
    "allreduce": ["--strategy", "allreduce"],
    "server sync": _SERVER,
    "server collective": [*_SERVER, "--ps-transport", "collective"],
    "server async": [*_SERVER, "--ps-mode", "async"],
    "server backup": [*_SERVER, "--ps-mode", "backup"],
    "server remote": [*_SERVER, "--ps-forward", "remote"],
}
LOG_EVERY = 2
"""Iterations between rows of metrics: what is counted begins and ends with one."""
CALM = 0.9
"""Quantile of the rates of a run's pieces."""


def measure(
    topology: str, workers: int, preset: str, batch: int, warm_up: int, iterations: int
) -> dict[str, Any]:
    """Train once and return tasks per second and, a step, bytes and the server's seconds.

    The first ``warm_up`` iterations are not counted: memory is still touched for the first time,
    a few megabytes more in every tenth step or so, which takes 20 ms and more.

    Raises:
        SystemExit: with what the run has said, if it fails.
    """
    flags = TOPOLOGIES[topology]
    processes = workers + ("param-server" in flags)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    apart = workers if topology == "apart" else 1
    own_batch = batch // apart
    with tempfile.TemporaryDirectory() as folder:
        run_dirs = [Path(folder) / str(number) for number in range(apart)]
        runs = [
            subprocess.Popen(
                [
                    sys.executable,
                    *([] if "local" in flags else launcher),
                    *("train_maml.py", preset, *flags),
                    *("--run-dir", str(run_dir), "--iterations", str(warm_up + iterations)),
                    *("--meta-batch-size", str(own_batch), "--log-every", str(LOG_EVERY)),
                    *("--threads", "1", "--logger", "none", "--eval-every", "0"),
                    *("--test-tasks", "0", "--resume", "never"),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for run_dir in run_dirs
        ]
        said = [run.communicate()[1] for run in runs]
        for run, words in zip(runs, said, strict=True):
            if run.returncode:
                raise SystemExit(f"{topology}, {workers} workers: {words}")
        parts = [read_metrics(run_dir / "metrics.jsonl") for run_dir in run_dirs]
    return _together([_rates(rows, own_batch, warm_up) for rows in parts])


def _rates(rows: list[dict[str, Any]], batch: int, warm_up: int) -> dict[str, Any]:
    """Return one run's figures; ``pieces`` are the rates between rows of its metrics."""
    counted = [row for row in rows if row["iteration"] >= warm_up]
    first, *rest = counted
    steps = rest[-1]["iteration"] - first["iteration"]
    row: dict[str, Any] = {
        "tasks_per_second": steps * batch / (rest[-1]["seconds"] - first["seconds"]),
        "pieces": [
            (b["iteration"] - a["iteration"]) * batch / (b["seconds"] - a["seconds"])
            for a, b in pairwise(counted)
        ],
        "wire_bytes": sum(row.get("wire_bytes", 0) for row in rest) / steps,
    }
    for name in ("server_seconds", "reduce_seconds"):
        if name in rest[0]:
            row[name] = sum(row[name] for row in rest) / steps
    if "dropped" in rest[0]:
        row["dropped"] = sum(row["dropped"] for row in rest) / steps
    if "staleness" in rest[0]:
        # Mean age, in updates, of the gradients that were applied.
        counts = [(age, n) for row in rest for age, n in enumerate(row["staleness"])]
        row["staleness"] = sum(age * n for age, n in counts) / max(sum(n for _, n in counts), 1)
    return row


def _together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of runs that went side by side: one, unless they were apart."""
    return {
        **runs[0],
        "tasks_per_second": sum(run["tasks_per_second"] for run in runs),
        "pieces": [run["pieces"] for run in runs],
    }


def combinations(topologies: list[str], workers: list[int]) -> list[tuple[str, int]]:
    """Return what to measure: local is one worker, and some make sense from two on."""
    return [
        (topology, n)
        for topology in topologies
        for n in ([1] if topology == "local" else workers)
        if n > 1 or topology not in ("apart", "server backup")
    ]


def summarise(topology: str, workers: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over rounds, the extremes of tasks per second, and the calm rate."""
    rates = [row["tasks_per_second"] for row in rounds]
    # A run's pieces of all rounds together; those of runs side by side are added up.
    own = [list(chain(*pieces)) for pieces in zip(*(row["pieces"] for row in rounds), strict=True)]
    names = [name for name in rounds[0] if name != "pieces"]
    calm = {"calm": sum(float(np.quantile(run, CALM)) for run in own)}
    if "staleness" in names:
        calm = {}  # asynchronous updates come in bursts, as trainers finish: a piece says nothing
    return {
        "topology": topology,
        "workers": workers,
        **{name: statistics.median(row[name] for row in rounds) for name in names},
        "range": [min(rates), max(rates)],
        **calm,
        "rounds": len(rounds),
    }


def table(report: dict[str, Any]) -> str:
    """Return a record as Markdown; ``×`` is relative to the first row, and so is the calm one."""
    rows = report["rows"]
    base, calm_base = rows[0]["tasks_per_second"], rows[0].get("calm", math.nan)
    shown: dict[str, Callable[[dict[str, Any]], str]] = {
        "topology": lambda row: f"`{row['topology']}`",
        "workers": lambda row: str(row["workers"]),
        "tasks/s": lambda row: f"{row['tasks_per_second']:.1f}",
        "range": lambda row: "{:.1f}–{:.1f}".format(*row["range"]),
        "×": lambda row: f"{row['tasks_per_second'] / base:.2f}",
        "calm": lambda row: f"{row['calm']:.1f}",
        "× calm": lambda row: f"{row['calm'] / calm_base:.2f}",
        "KiB a step": lambda row: f"{row['wire_bytes'] / 1024:.0f}",
        "server ms": lambda row: f"{1e3 * row['server_seconds']:.1f}",
        "reduce ms": lambda row: f"{1e3 * row['reduce_seconds']:.1f}",
        "staleness": lambda row: f"{row['staleness']:.2f}",
        "dropped": lambda row: f"{row['dropped']:.2f}",
    }

    def cell(name: str, row: dict[str, Any]) -> str:
        try:
            return shown[name](row)
        except KeyError:
            return ""  # no topology has all figures

    cells = {name: [cell(name, row) for row in rows] for name in shown}
    cells = {name: column for name, column in cells.items() if any(column)}
    return grid(list(cells), list(zip(*cells.values(), strict=True)))


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw tasks per second and bytes a step against workers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    rows = report["rows"]
    colors = plt.get_cmap("tab10")
    for i, topology in enumerate(dict.fromkeys(row["topology"] for row in rows)):
        own = [row for row in rows if row["topology"] == topology]
        x = [row["workers"] for row in own]
        style = {"marker": "o", "markersize": 4, "color": colors(i), "label": topology}
        axes[0].plot(x, [row["tasks_per_second"] for row in own], **style)
        if topology not in ("local", "apart"):
            axes[1].plot(x, [row["wire_bytes"] / 2**20 for row in own], **style)
    cores = report["hardware"]["cores"]
    most = max(row["workers"] for row in rows)
    for axis in axes:
        axis.axvline(cores, color="#999999", linestyle=":", linewidth=1)
        axis.set_xlabel("workers")
        axis.set_xticks(range(1, most + 1))
        axis.grid(alpha=0.25)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("tasks per second")
    axes[0].set_title(f"dotted: the machine's {cores} cores, one thread a process", fontsize=9)
    axes[1].set_ylabel("MiB sent a step")
    axes[1].set_title(f"{report['preset']}, {report['meta_batch_size']} tasks a step", fontsize=9)
    # Beside the axes: lines lie everywhere in them.
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run the benchmark."""
    parser = command_line("scaling", __doc__, plot=True)
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--workers", nargs="+", type=count, default=[1, 2, 4, 8])
    parser.add_argument("--preset", default="maml-glyphs-5way-1shot")
    parser.add_argument("--meta-batch-size", type=count, default=32)
    parser.add_argument("--iterations", type=count, default=100, help="after the warm-up")
    parser.add_argument("--warm-up", type=count, default=50, help="iterations that do not count")
    parser.add_argument("--rounds", type=count, default=3)
    options = parser.parse_args()
    if options.iterations < 2 * LOG_EVERY:
        parser.error(f"--iterations {options.iterations}: at least {2 * LOG_EVERY}")
    for n in options.workers:
        if "apart" in options.topologies and options.meta_batch_size % n:
            parser.error(f"--meta-batch-size {options.meta_batch_size}: no multiple of {n} workers")
    # Users' settings of threads would be measured otherwise.
    os.environ["OMP_NUM_THREADS"] = "1"
    what = combinations(options.topologies, options.workers)
    found: dict[tuple[str, int], list[dict[str, Any]]] = {key: [] for key in what}
    report: dict[str, Any] = {
        "hardware": describe(1),
        "preset": options.preset,
        "meta_batch_size": options.meta_batch_size,
    }
    for number in range(1, options.rounds + 1):
        bar = tqdm(what, desc=f"round {number} of {options.rounds}", unit="run", leave=False)
        for topology, workers in bar:
            found[topology, workers].append(
                measure(
                    *(topology, workers, options.preset, options.meta_batch_size),
                    *(options.warm_up, options.iterations),
                )
            )
        report["rows"] = [summarise(*key, rounds) for key, rounds in found.items()]
        # After each round: hours of them may not all be had.
        write(options.json, report)
    print(f"{options.preset}, {options.meta_batch_size} tasks a step, medians of {options.rounds}")
    print(table(report))
    if options.plot:
        draw(report, options.plot)


if __name__ == "__main__":
    main()
