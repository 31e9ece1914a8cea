"""Evaluation: mean and interval over tasks; also ``python -m maml.evaluate RUN_DIR``.

    python -m maml.evaluate runs/maml-omniglot-5way-1shot-… --split test --tasks 600

It appends to the run directory's ``evaluations.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from maml.config import Config
from maml.distributed import World, choose_device, init_process
from maml.errors import UserError
from maml.inner import Params
from maml.objectives import mean_and_ci95
from maml.strategies import Strategy
from maml.strategies.local import Local
from maml.worker import Worker

SPLITS = ("train", "validation", "test")


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
    tasks = min(tasks, strategy.worker.evaluation(split).one_pass or tasks)
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


def main(arguments: list[str]) -> None:
    """Evaluate a run directory's newest checkpoint and append to its evaluations.jsonl."""
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
    options = parser.parse_args(arguments)
    if options.tasks < 1:
        raise UserError(f"--tasks must be at least 1, not {options.tasks}")

    from maml import checkpoint, run_dir
    from maml.presets import with_values

    config = with_values(run_dir.read_config(options.run_dir), strategy="local")
    for name in ("data_root", "device"):
        if getattr(options, name) is not None:
            config = with_values(config, **{name: getattr(options, name)})
    saved = checkpoint.load(checkpoint.last_checkpoint(options.run_dir))
    world = World(0, 1, 0, 1, launched=False)
    init_process(config, world)
    strategy = Local(config, world, Worker(config, choose_device(config, world)))
    result = evaluate(strategy, saved["model"], options.split, options.tasks, progress=True)
    transductive = config.transductive and not options.non_transductive
    row = {
        "iteration": saved["iteration"],
        "transductive": transductive,
        **result,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    run_dir.append_line(options.run_dir / "evaluations.jsonl", json.dumps(row))
    print(f"iteration {saved['iteration']}: {summary(result, config, transductive)}")


if __name__ == "__main__":
    from maml.program import run_program

    run_program(main, sys.argv[1:])
