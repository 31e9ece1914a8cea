"""What adaptation gains on held-out physics, over seeds, with the statistics that RL asks for.

    python -m benchmarks.adaptation --json FILE [--seeds 10] [--tasks 40]

For each seed, MAML (`maml-cartpole`), and a policy pre-trained on all tasks alike (the same without
an inner step), train for as many iterations. Both are measured on the same held-out tasks, before
and after one policy-gradient step on as many support episodes. The step of the pre-trained one has
the rate, of `RATES`, that is best on validation tasks.

Each table cell is the interquartile mean over seeds and tasks, with a 95 % stratified bootstrap
interval (Agarwal et al. 2021, arXiv:2108.13264): seeds are drawn anew within each task.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from benchmarks.command import command_line, count, write
from benchmarks.hardware import describe
from benchmarks.markdown import grid
from maml.config.presets import with_values
from maml.run import checkpoint, directory
from maml.worker import Worker

RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
ROWS = {
    "maml after": "MAML, adapted",
    "maml before": "MAML, before",
    "pretrained": "pre-trained on all tasks",
    "fine-tuned": "pre-trained, fine-tuned",
}
METHODS = {"maml": [], "pretrained": ["--inner-steps", "0"]}
RESAMPLES = 2000


def main() -> None:
    """Train and measure; write and print what came of it."""
    own = _parse()
    scores: dict[str, list[list[float]]] = {name: [] for name in ROWS}
    rates: list[float] = []
    if own.resume and own.json is not None and own.json.exists():
        before = json.loads(own.json.read_text())
        if [before[name] for name in ("iterations", "tasks")] != [own.iterations, own.tasks]:
            raise SystemExit(f"error: --resume: {own.json} is of other --iterations or --tasks")
        scores, rates = before["returns"], before["rates"]
    for seed in range(len(rates), own.seeds):
        found, rate = _of_seed(seed, own)
        rates.append(rate)
        for name, values in found.items():
            scores[name].append(values)
        means = {name: round(float(np.mean(rows[-1])), 1) for name, rows in scores.items()}
        print(seed, means, rate, flush=True)
        record = {
            "hardware": describe(threads=1), "iterations": own.iterations, "tasks": own.tasks,
            "preset": "maml-cartpole", "rates": rates, "returns": scores,
        }  # fmt: skip
        # After each seed: what was measured is not lost if the next one fails.
        write(own.json, record)
    print(table(record))


def _of_seed(seed: int, own: argparse.Namespace) -> tuple[dict[str, list[float]], float]:
    """Return the returns of all tasks, and the rate that fine-tuning takes."""
    with tempfile.TemporaryDirectory() as folder:
        trainings = []
        for name, flags in METHODS.items():
            command = [
                *(sys.executable, "train_maml.py", "maml-cartpole", *flags),
                *("--seed", str(seed), "--iterations", str(own.iterations), "--logger", "none"),
                *("--eval-every", "0", "--test-tasks", "0", "--run-dir", f"{folder}/{name}"),
            ]
            trainings.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        codes = [training.wait() for training in trainings]
        if any(codes):
            raise RuntimeError(f"seed {seed}: a training failed")
        maml, pretrained = (Path(folder) / name for name in METHODS)
        before, after = _returns(maml, "test", own.tasks)
        plain, _ = _returns(pretrained, "test", own.tasks)
        best = max(
            RATES, key=lambda rate: sum(_returns(pretrained, "validation", own.tasks, rate)[1])
        )
        _, tuned = _returns(pretrained, "test", own.tasks, best)
    return dict(zip(ROWS, (after, before, plain, tuned), strict=True)), best


def _returns(
    run_dir: Path, split: str, tasks: int, rate: float | None = None
) -> tuple[list[float], list[float]]:
    """Return each task's return before and after one step, of the same number of episodes."""
    config = directory.config_here(run_dir, None, None)
    # All seeds are measured on the same tasks.
    config = with_values(config, seed=0, inner_steps=1, inner_lr=rate or config.inner_lr)
    params = checkpoint.load(checkpoint.last_checkpoint(run_dir))["model"]
    found = []
    for steps in (0, 1):
        worker = Worker(with_values(config, eval_inner_steps=steps), torch.device("cpu"))
        rows = worker.evaluate(params, split, torch.arange(tasks), worker.learner)
        found.append(rows[:, worker.evaluation_names.index("return")].tolist())
    return found[0], found[1]


def interval(scores: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the interquartile mean of ``[seeds, tasks]``, and its 95 % interval's two ends."""
    generator = np.random.default_rng(0)
    n_seeds, n_tasks = scores.shape
    drawn = generator.integers(n_seeds, size=(RESAMPLES, n_seeds, n_tasks))
    samples = np.take_along_axis(scores[None], drawn, axis=1).reshape(RESAMPLES, -1)
    low, high = np.quantile(stats.trim_mean(samples, 0.25, axis=1), (0.025, 0.975))
    return float(stats.trim_mean(scores, 0.25, axis=None)), float(low), float(high)


def _parse() -> argparse.Namespace:
    parser = command_line("adaptation", __doc__)
    parser.add_argument("--seeds", type=count, default=10)
    parser.add_argument("--tasks", type=count, default=40)
    parser.add_argument("--iterations", type=count, default=100)
    parser.add_argument("--resume", action="store_true", help="go on after the seeds in --json")
    return parser.parse_args()


def table(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    cells = []
    for name, row in ROWS.items():
        scores = np.array(record["returns"][name])
        mean, low, high = interval(scores)
        cells.append([row, f"{mean:.1f} [{low:.1f}, {high:.1f}]", f"{scores.mean():.1f}"])
    n_seeds, n_tasks = scores.shape
    return grid(["policy", f"return, {n_seeds} seeds × {n_tasks} tasks", "plain mean"], cells)


if __name__ == "__main__":
    main()
