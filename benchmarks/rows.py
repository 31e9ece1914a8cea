"""How long each row of the published tables takes: every preset, on real data, for some seconds.

    python -m benchmarks.rows                                    # all rows whose data are here
    python -m benchmarks.rows --presets 'protonet-*' --seconds 60 --json rows.json

A preset takes its outer steps as a run does, from the middle of its training on, where schedules of
the first epochs are over. Time is the process's own time on a core, all its threads added up: what
else the machine does hardly counts. So the hours are those of one core that does nothing else,
without validation and test.
"""

from __future__ import annotations

import fnmatch
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command import command_line, count, positive, write
from benchmarks.hardware import describe
from benchmarks.markdown import grid
from datasets.errors import DataError
from datasets.paths import default_data_root
from maml.config import Config
from maml.config.presets import PRESETS, with_values
from maml.metagradient.outer_optimizer import OuterOptimizer
from maml.processes.device import choose_device
from maml.processes.setup import init_process
from maml.processes.world import World
from maml.strategies.local import Local
from maml.worker import Worker

LEAST = 3
"""Iterations that are timed at least."""


def measure(config: Config, seconds: float) -> dict[str, Any]:
    """Return a preset's record: how many iterations it took in about ``seconds``.

    Raises:
        DataError: if its data are not here.
    """
    world = World(0, 1, 0, 1, launched=False)
    init_process(config, world)
    worker = Worker(config, choose_device(config, world))
    strategy = Local(config, world, worker)
    worker.get_ready(strategy.share_sizes())
    optimizer = OuterOptimizer(config, worker.learner.meta_parameters())
    iteration = config.iterations // 2

    def step() -> None:
        nonlocal iteration
        ids = worker.training.ids(iteration, config.meta_batch_size)
        share = strategy.meta_step(optimizer.params, ids)
        optimizer.step(share.gradients, share.n_tasks, iteration)
        iteration += 1

    step()
    first, wall, core = iteration, time.perf_counter(), time.process_time()
    while iteration - first < LEAST or time.process_time() - core < seconds:
        step()
    done, core = iteration - first, time.process_time() - core
    return {
        "preset": config.preset,
        "published": config.published,
        "iterations": config.iterations,
        "meta_batch_size": config.meta_batch_size,
        "measured_iterations": done,
        "core_seconds": core,
        "wall_seconds": time.perf_counter() - wall,
        "tasks_per_core_second": done * config.meta_batch_size / core,
        "core_hours": config.iterations * core / done / 3600,
        "not_served_by_kernels": worker.why_no_kernels(),
    }


def table(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    rows = [
        [
            f"`{row['preset']}`",
            f"{row['iterations']:,}",
            str(row["meta_batch_size"]),
            f"{row['tasks_per_core_second']:.3g}",
            f"{row['core_hours']:.{0 if row['core_hours'] >= 9.95 else 1}f}",
        ]
        for row in report["records"]
    ]
    return grid(["preset", "iterations", "tasks each", "tasks/s", "hours"], rows)


def main() -> None:
    """Run the benchmark."""
    parser = command_line("rows", __doc__)
    parser.add_argument("--presets", nargs="+", metavar="PATTERN", default=["*"])
    parser.add_argument("--seconds", type=positive, default=20.0, help="of each (default: 20)")
    parser.add_argument("--threads", type=count, default=1, help="(default: 1)")
    parser.add_argument("--data-root", type=Path, default=default_data_root())
    options = parser.parse_args()
    chosen = [
        config
        for name, config in PRESETS.items()
        if config.published is not None
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in options.presets)
    ]
    if not chosen:
        parser.error(f"--presets {' '.join(options.presets)}: no row of a published table")
    report: dict[str, Any] = {"hardware": describe(options.threads), "records": []}
    for preset in tqdm(chosen, unit="row"):
        here = {"data_root": str(options.data_root), "threads": options.threads}
        config = with_values(preset, strategy="local", device="cpu", **here)
        try:
            report["records"].append(measure(config, options.seconds))
        except DataError as error:
            print(f"{preset.preset}: left out: {error}", file=sys.stderr)
        write(options.json, report)
    print(table(report))


if __name__ == "__main__":
    main()
