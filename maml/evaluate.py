"""Evaluation: mean and interval over tasks; also ``python -m maml.evaluate RUN_DIR``.

    python -m maml.evaluate runs/maml-omniglot-5way-1shot-… --split test --tasks 600
    python -m maml.evaluate runs/20w5s --watch --split validation

It appends to the run directory's ``evaluations.jsonl``; with ``--watch``, a row for every
checkpoint as training makes them.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from maml.config import Config
from maml.config.checks import MOST, most_threads
from maml.config.presets import with_values
from maml.errors import UserError
from maml.learners.objectives import mean_and_ci95
from maml.params import Params
from maml.processes.device import choose_device
from maml.processes.setup import init_process
from maml.processes.world import World
from maml.run import checkpoint, directory, files
from maml.run.watch import watch
from maml.strategies import Strategy
from maml.strategies.local import Local
from maml.worker import Worker

SPLITS = ("train", "validation", "test")
POLL, PATIENCE = 5.0, 3600.0
"""Seconds between two looks at a run that is watched, and until it is given up."""


def there_are(tasks: int, worker: Worker, split: str) -> int:
    """Return how many of ``tasks`` there are in ``split``: examples run out, episodes do not."""
    return min(tasks, worker.evaluation(split).one_pass or tasks)


def evaluate(
    strategy: Strategy,
    meta_params: Params,
    split: str,
    tasks: int,
    *,
    progress: bool = False,
    between: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Evaluate tasks 0 … ``tasks`` − 1 of ``split``; call ``between`` between rounds of some.

    Where examples run out, it ends: to see them twice would narrow the interval for nothing.

    Returns:
        ``tasks``, ``split`` and, for every evaluation metric, its mean over tasks and
        ``<metric>_ci95``, the half-width 1.96·σ/√tasks (Finn et al. 2017, table 1).
    """
    config = strategy.config
    tasks = there_are(tasks, strategy.worker, split)
    # Rounds small enough to show progress and to answer a stop signal between two.
    round_size = max(config.task_batch, 4) * strategy.world.size
    rows = []
    with tqdm(
        total=tasks, desc=split, unit="task", disable=not progress, leave=False, mininterval=1
    ) as bar:
        for ids in torch.arange(tasks).split(round_size):
            between()
            rows.append(strategy.evaluate(meta_params, split, ids))
            bar.update(len(ids))
    values = torch.cat(rows)
    result: dict[str, Any] = {"split": split, "tasks": tasks}
    for name, column in zip(strategy.worker.evaluation_names, values.T, strict=True):
        result[name], result[f"{name}_ci95"] = mean_and_ci95(column)
    return result


def summary(result: dict[str, Any], config: Config, transductive: bool) -> str:
    """Say a result in one line, both ways of normalising the queries included."""
    metric = "accuracy" if "accuracy" in result else "loss"
    unit, scale = (" %", 100.0) if metric == "accuracy" else ("", 1.0)

    def number(prefix: str) -> str:
        mean, ci95 = result[f"{prefix}{metric}"], result[f"{prefix}{metric}_ci95"]
        interval = "?" if ci95 is None else f"{scale * ci95:.2f}"
        return f"{scale * mean:.2f} ± {interval}{unit}"

    first, second = ("", "non_transductive_") if transductive else ("non_transductive_", "")
    names = {"": "transductive", "non_transductive_": "non-transductive"}
    both = f"{number(first)} ({names[first]}), {number(second)} ({names[second]})"
    if config.data == "sinusoid":
        both = number("")
    over = f"mean ± 95 % interval over {result['tasks']}"
    if config.learner == "supervised":
        five = f"precision@5 {100 * result[first + 'precision@5']:.2f} %"
        return (
            f"{result['split']} {metric} {both}, {five}: {over} batches of {config.batch_size} "
            "examples"
        )
    examples = f"{config.ways}-way {config.shots}-shot, {config.eval_queries} queries per class"
    if config.data == "sinusoid":
        examples = f"{config.shots}-shot, {config.eval_queries} queries"
    return (
        f"{result['split']} {metric} {both}: {over} tasks, "
        f"{examples}, {config.eval_inner_steps} inner steps"
    )


def main(arguments: list[str]) -> int:
    """Evaluate a run directory's newest checkpoint, or watch it; return the exit code."""
    options = _parse(arguments)
    evaluator = RunEvaluator(options)
    if options.watch:
        poll, patience = options.poll or POLL, options.patience or PATIENCE
        return watch(options.run_dir, evaluator, poll=poll, patience=patience)
    config = evaluator.config_now()
    saved = checkpoint.load(checkpoint.last_checkpoint(options.run_dir))
    evaluator.build(config)
    evaluator.evaluate(saved)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m maml.evaluate", description="Evaluate a run directory's last checkpoint."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--tasks", type=int, default=600, help="tasks to evaluate (default: 600)")
    parser.add_argument(
        "--non-transductive",
        action="store_true",
        help="headline: normalise each query by the support set's statistics alone",
    )
    parser.add_argument("--data-root", help="where the data sets are now (default: as in the run)")
    parser.add_argument("--device", help="cpu, cuda, cuda:N or auto (default: as in the run)")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="evaluate every checkpoint that the run keeps or makes, until its training is over; "
        "may be started before it, and again: what is evaluated already is not repeated",
    )
    parser.add_argument(
        "--poll", type=float, help=f"--watch: seconds between looks (default: {POLL:g})"
    )
    parser.add_argument(
        "--patience",
        type=float,
        help="--watch: give up when nothing in RUN_DIR changes for so many seconds "
        f"(default: {PATIENCE:g})",
    )
    options = parser.parse_args(arguments)
    if options.tasks < 1:
        raise UserError(f"--tasks must be at least 1, not {options.tasks}")
    if options.tasks > MOST:
        raise UserError(f"--tasks must be at most {MOST}, not {options.tasks}")
    if options.data_root == "":
        raise UserError('--data-root "": empty; was a shell variable not set?')
    for name in ("poll", "patience"):
        value = getattr(options, name)
        if value is not None and not options.watch:
            raise UserError(f"--{name} goes with --watch")
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name} must be positive and finite, not {value}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("python -m maml.evaluate runs in one process: start it without torchrun")
    return options


class RunEvaluator:
    """Evaluates checkpoints of one run as the command line asks, all with the same worker."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows = options.run_dir / "evaluations.jsonl"
        # Not after an evaluation that takes an hour.
        if self.rows.is_dir():
            raise UserError(f"{self.rows}: is a folder")
        self.config: Config | None = None

    def config_now(self) -> Config:
        """Return the run's configuration, with what is otherwise here.

        Raises:
            UserError: as `directory.read_config`.
        """
        config = with_values(directory.read_config(self.options.run_dir), strategy="local")
        for name in ("data_root", "device"):
            if getattr(self.options, name) is not None:
                config = with_values(config, **{name: getattr(self.options, name)})
        if config.threads is not None and config.threads > most_threads():
            # As many as the run's machine had cores for, perhaps; results do not depend on it.
            config = with_values(config, threads=None)
        return config

    def build(self, config: Config) -> None:
        """Build the worker and open its episodes."""
        world = World(0, 1, 0, 1, launched=False)
        init_process(config, world)
        worker = Worker(config, choose_device(config, world))
        worker.evaluation(self.options.split)
        self.strategy = Local(config, world, worker)
        self.config = config

    def prepare(self) -> bool:
        """Build the worker when there is a configuration, and anew when it is another one."""
        try:
            config = self.config_now()
        except UserError as error:
            cause = error.__cause__
            # Not there yet; or replaced while it was read, over NFS.
            if isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ESTALE):
                return self.config is not None
            raise
        # A training that continues may be given other queries or inner steps to evaluate with.
        if config != self.config:
            self.build(config)
        return True

    def question(self) -> dict[str, Any]:
        """Return what tells rows about one checkpoint apart: what was asked."""
        config, options = self.config, self.options
        assert config is not None
        return {
            "transductive": config.transductive and not options.non_transductive,
            "split": options.split,
            "tasks": there_are(options.tasks, self.strategy.worker, options.split),
            "eval_queries": config.eval_queries,
            "eval_inner_steps": config.eval_inner_steps,
        }

    def evaluated(self) -> set[int]:
        """Return the iterations that have a row for the same question.

        Raises:
            UserError: as `files.read_rows`.

        The iteration alone names a checkpoint: a training that goes back over it makes the same
        parameters again.
        """
        question = self.question().items()
        rows = files.read_rows(self.rows, mended=True)
        return {row["iteration"] for row in rows if question <= row.items()}

    def evaluate(self, saved: dict[str, Any]) -> None:
        """Evaluate a checkpoint's content, append the row and print it."""
        assert self.config is not None
        options, question = self.options, self.question()
        params = self.strategy.worker.learner.meta_parameters()
        checkpoint.check_model(saved, params, f"{options.run_dir}, after {saved['iteration']}")
        # A line that goes on for hours is for terminals.
        progress = sys.stderr.isatty() or not options.watch
        result = evaluate(
            self.strategy, saved["model"], options.split, options.tasks, progress=progress
        )
        row = {
            "iteration": saved["iteration"],
            **question,
            **result,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        # Where a full disk has cut the last row short, this one begins a line of its own.
        before = self.rows.read_bytes() if self.rows.is_file() else b""
        mend = "\n" if before and not before.endswith(b"\n") else ""
        files.append_line(self.rows, mend + json.dumps(row))
        line = summary(result, self.config, question["transductive"])
        print(f"iteration {saved['iteration']}: {line}", flush=True)


if __name__ == "__main__":
    from maml.processes.program import run_program

    run_program(main, sys.argv[1:])
