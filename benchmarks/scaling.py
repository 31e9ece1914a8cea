"""Tasks per second, bytes a step and the server's time against workers, every strategy.

    python -m benchmarks.scaling --json scaling.json --plot scaling.png
    python -m benchmarks.scaling --topologies allreduce "rpc chunk" --workers 1 2 --rounds 5

Every measurement is one run of ``train_maml.py`` under torchrun with one computing thread a
process, as a user starts it; the rounds interleave. A worker is a process that computes: a
parameter server is one process more. ``local`` is the same run without a launcher, and ``apart``
as many of those at once, each with its part of the tasks and no word between them: the most that
the machine gives to any topology. Beyond the cores of the machine, workers share them: what is
seen there is the overhead, not speed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command import command_line, count, write
from benchmarks.markdown import table
from maml.plots import style
from maml.run.files import read_rows
from maml.run.provenance import describe

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
COLUMNS = {
    "topology": "`{topology}`",
    "workers": "{workers}",
    "tasks/s": "{tasks_per_second:.1f}",
    "range": "{range[0]:.1f}–{range[1]:.1f}",
    "×": "{times:.2f}",
    "KiB a step": "{kib:.0f}",
    "server ms": "{server_ms:.1f}",
    "reduce ms": "{reduce_ms:.1f}",
    "staleness": "{staleness:.2f}",
    "dropped": "{dropped:.2f}",
}
"""No topology has all figures."""


def measure(
    topology: str, workers: int, preset: str, batch: int, warm_up: int, iterations: int
) -> dict[str, float]:
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
        for run in runs:
            words = run.communicate()[1]
            if run.returncode:
                raise SystemExit(f"{topology}, {workers} workers: {words}")
        parts = [
            figures(read_rows(run_dir / "metrics.jsonl"), own_batch, warm_up)
            for run_dir in run_dirs
        ]
    # Runs that were apart went side by side.
    return parts[0] | {"tasks_per_second": sum(part["tasks_per_second"] for part in parts)}


def figures(rows: list[dict[str, Any]], batch: int, warm_up: int) -> dict[str, float]:
    """Return one run's figures, of its metrics after ``warm_up`` iterations."""
    first, *rest = [row for row in rows if row["iteration"] >= warm_up]
    steps = rest[-1]["iteration"] - first["iteration"]
    found: dict[str, float] = {
        "tasks_per_second": steps * batch / (rest[-1]["seconds"] - first["seconds"])
    }
    for name, column, scale in (
        ("kib", "wire_bytes", 1 / 1024),
        ("server_ms", "server_seconds", 1e3),
        ("reduce_ms", "reduce_seconds", 1e3),
        ("dropped", "dropped", 1.0),
    ):
        if column in rest[0] or name == "kib":
            found[name] = scale * sum(row.get(column, 0) for row in rest) / steps
    if "staleness" in rest[0]:
        # Mean age, in updates, of the gradients that were applied.
        counts = [(age, n) for row in rest for age, n in enumerate(row["staleness"])]
        found["staleness"] = sum(age * n for age, n in counts) / max(sum(n for _, n in counts), 1)
    return found


def combinations(topologies: list[str], workers: list[int]) -> list[tuple[str, int]]:
    """Return what to measure: local is one worker, and some make sense from two on."""
    return [
        (topology, n)
        for topology in topologies
        for n in ([1] if topology == "local" else workers)
        if n > 1 or topology not in ("apart", "server backup")
    ]


def summarise(found: dict[tuple[str, int], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a row each: medians over rounds, and the extremes of tasks per second.

    ``times`` is relative to the first.
    """
    rows: list[dict[str, Any]] = []
    for (topology, workers), rounds in found.items():
        rates = [row["tasks_per_second"] for row in rounds]
        medians = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
        base = rows[0]["tasks_per_second"] if rows else medians["tasks_per_second"]
        rows.append(
            {
                "topology": topology,
                "workers": workers,
                **medians,
                "range": [min(rates), max(rates)],
                "times": medians["tasks_per_second"] / base,
                "rounds": len(rounds),
            }
        )
    return rows


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw tasks per second and bytes a step against workers."""
    figure, ((*axes,),) = style.figure(1, 2, (5.0, 4.0))
    rows = report["rows"]
    looks = style.look_of(list(dict.fromkeys(row["topology"] for row in rows)))
    for topology, (color, dash) in looks.items():
        own = [row for row in rows if row["topology"] == topology]
        x = [row["workers"] for row in own]
        look = {"marker": "o", "markersize": 4, "color": color, "linestyle": dash}
        axes[0].plot(x, [row["tasks_per_second"] for row in own], label=topology, **look)
        if topology not in ("local", "apart"):
            axes[1].plot(x, [row["kib"] / 1024 for row in own], **look)
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
    found: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in what}
    report: dict[str, Any] = {
        "hardware": describe(1),
        "preset": options.preset,
        "meta_batch_size": options.meta_batch_size,
        "columns": COLUMNS,
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
        report["rows"] = summarise(found)
        # After each round: hours of them may not all be had.
        write(options.json, report)
    print(f"{options.preset}, {options.meta_batch_size} tasks a step, medians of {options.rounds}")
    print(table(report))
    if options.plot:
        draw(report, options.plot)


if __name__ == "__main__":
    main()
