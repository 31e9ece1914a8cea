"""Tasks per second, bytes per step and server time of every strategy, by number of workers.

    python -m benchmarks.scaling --json scaling.json
    python -m benchmarks.scaling --topologies allreduce "rpc chunk" --workers 1 2 --rounds 5

Every measurement is one run of ``train_maml.py`` under torchrun, as a user starts it, with one
computing thread per process. The rounds interleave. A worker is a process that computes; a
parameter server is one more process. ``local`` is the same run without a launcher. ``apart`` is one
such run per worker, all at once, each with its part of the tasks and without communication: an
upper bound for every topology on this machine. With more workers than cores, workers share cores,
and the results show overhead, not speed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import record
from maml.config.parser import at_least
from maml.errors import UserError
from maml.processes.program import run_program
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
"""Iterations between rows of metrics. The measured period begins and ends with a row."""
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
"""The columns of the table; no topology has all of these figures."""


def measure(topology: str, workers: int, options: argparse.Namespace) -> dict[str, float]:
    """Train once; return the `figures` of the run. Those of ``apart`` have the sum of the rates.

    The first ``warm_up`` iterations are not counted: about every tenth step still touches a few
    megabytes of memory for the first time, which takes 20 ms and more.
    """
    flags = TOPOLOGIES[topology]
    processes = workers + ("param-server" in flags)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    apart = workers if topology == "apart" else 1
    batch, iterations = options.meta_batch_size // apart, options.warm_up + options.iterations
    command = [sys.executable, *([] if "local" in flags else launcher), "train_maml.py"]
    command += [options.preset, *flags, "--iterations", str(iterations)]
    command += ["--meta-batch-size", str(batch), "--log-every", str(LOG_EVERY), "--threads", "1"]
    command += ["--logger", "none", "--eval-every", "0", "--test-tasks", "0", "--resume", "never"]
    with tempfile.TemporaryDirectory() as folder:
        run_dirs = [Path(folder) / str(number) for number in range(apart)]
        runs = [
            subprocess.Popen(
                [*command, "--run-dir", str(run_dir)],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for run_dir in run_dirs
        ]  # fmt: skip
        for run in runs:
            words = run.communicate()[1]
            if run.returncode:
                raise UserError(f"{topology}, {workers} workers: {words}")
        parts = [figures(read_rows(d / "metrics.jsonl"), batch, options.warm_up) for d in run_dirs]
    # The runs of ``apart`` ran at the same time, so their rates add up.
    return parts[0] | {"tasks_per_second": sum(part["tasks_per_second"] for part in parts)}


def figures(rows: list[dict[str, Any]], batch: int, warm_up: int) -> dict[str, float]:
    """Return one run's figures, from its metrics after ``warm_up`` iterations."""
    first, *rest = [row for row in rows if row["iteration"] >= warm_up]
    steps = rest[-1]["iteration"] - first["iteration"]
    rate = steps * batch / (rest[-1]["seconds"] - first["seconds"])
    found = {"tasks_per_second": rate, "kib": 0.0}
    for name, column, scale in (
        ("kib", "wire_bytes", 1 / 1024),
        ("server_ms", "server_seconds", 1e3),
        ("reduce_ms", "reduce_seconds", 1e3),
        ("dropped", "dropped", 1.0),
    ):
        if column in rest[0]:
            found[name] = scale * sum(row[column] for row in rest) / steps
    if "staleness" in rest[0]:
        # Mean age, in updates, of the gradients that were applied.
        counts = [(age, n) for row in rest for age, n in enumerate(row["staleness"])]
        found["staleness"] = sum(age * n for age, n in counts) / max(sum(n for _, n in counts), 1)
    return found


def summarise(measured: dict[tuple[str, int], list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return rows of medians over rounds; ``times`` is the speed relative to the first row."""
    rows: list[dict[str, Any]] = []
    for (topology, workers), rounds in measured.items():
        rates = [row["tasks_per_second"] for row in rounds]
        row: dict[str, Any] = {"topology": topology, "workers": workers, "rounds": len(rounds)}
        row |= {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        base = rows[0] if rows else row
        row["range"] = [min(rates), max(rates)]
        row["times"] = row["tasks_per_second"] / base["tasks_per_second"]
        rows.append(row)
    return rows


def main(arguments: list[str]) -> None:
    """Run the benchmark."""
    parser = record.parser("scaling", __doc__)
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--workers", nargs="+", type=at_least(1), default=[1, 2, 4, 8])
    parser.add_argument("--preset", default="maml-glyphs-5way-1shot")
    parser.add_argument("--meta-batch-size", type=at_least(1), default=32)
    parser.add_argument("--iterations", type=at_least(4), default=100, help="after the warm-up")
    text = "iterations that do not count"
    parser.add_argument("--warm-up", type=at_least(1), default=50, help=text)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    options = parser.parse_args(arguments)
    for n in options.workers:
        if "apart" in options.topologies and options.meta_batch_size % n:
            parser.error(f"--meta-batch-size {options.meta_batch_size}: no multiple of {n} workers")
    # Override a user's own number of threads, which would change the results.
    os.environ["OMP_NUM_THREADS"] = "1"
    # ``local`` has one worker; ``apart`` and ``server backup`` need at least two.
    what = [
        (topology, n)
        for topology in options.topologies
        for n in ([1] if topology == "local" else options.workers)
        if n > 1 or topology not in ("apart", "server backup")
    ]
    measured: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in what}
    report: dict[str, Any] = {
        "hardware": describe(1),
        "preset": options.preset,
        "meta_batch_size": options.meta_batch_size,
        "columns": COLUMNS,
    }
    for number in range(1, options.rounds + 1):
        for key in tqdm(what, desc=f"round {number} of {options.rounds}", unit="run", leave=False):
            measured[key].append(measure(*key, options))
        report["rows"] = summarise(measured)
        # Write after each round, because all rounds take hours and may be interrupted.
        record.write(options.json, report)
    print(f"{options.preset}, {options.meta_batch_size} tasks a step, medians of {options.rounds}")
    print(record.table(report))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
