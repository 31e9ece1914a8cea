"""What adaptation gains on held-out physics, over seeds, with the statistics that RL asks for.

    python -m benchmarks.adaptation --json FILE [--data cartpole-turned]

Three policies train for as many iterations, on as many episodes: MAML; one policy for all tasks
alike; and one for the average task, which is the standard CartPole. Each is then measured as it is,
and after policy-gradient steps on `EPISODES` episodes of a task.

1. *Choosing.* Each policy trains with each of its `SETTINGS`, with each of the seeds `CHOOSING`.
   Each is adapted to validation tasks with each of `STEPS` × `RATES`. What is best on average is
   kept. All trials are in the record.
2. *Measuring.* What was kept trains with seeds that had no part in choosing, and is measured once,
   on test tasks that no seed and no choice has seen.

The same command goes on after what FILE has already. A table cell is the interquartile mean over
seeds and tasks, with a 95 % bootstrap interval (Agarwal et al. 2021, arXiv:2108.13264); see
`interval`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from benchmarks.command import begun, command_line, count, write
from benchmarks.hardware import describe
from benchmarks.markdown import grid
from maml.config import Config
from maml.config.presets import PRESETS, with_values
from maml.params import Params
from maml.run import checkpoint
from maml.trainer import Trainer
from maml.worker import Worker

PRESET = PRESETS["maml-cartpole"]
BASE: dict[str, Any] = {
    "horizon": 200, "shots": 20, "queries": 10, "eval_queries": 10, "inner_lr": 3.0,
    "inner_steps": 1, "estimator": "dice", "meta_batch_size": 20, "meta_lr": 0.005,
    "meta_schedule": "cosine", "meta_lr_end": 0.0, "iterations": 150,
}  # fmt: skip
"""What `SETTINGS` vary. Not the preset's values: it may follow what is chosen here."""
EPISODES = 20
"""That a policy may adapt by, in one step or in several."""
CHOOSING = (0, 1)
MEASURED = tuple(range(10, 20))
VALIDATION, TEST = torch.arange(40), torch.arange(1000, 1040)
"""Ids of tasks, of the validation and of the test split."""

STEPS = (1, 2, 5)
RATES = (0.3, 1.0, 3.0, 10.0, 30.0)

# A pre-trained policy takes no inner step; it has MAML's support episodes as training episodes.
_PLAINS: list[dict[str, Any]] = [
    {"inner_steps": 0, "queries": EPISODES + 10, "meta_lr": rate} for rate in (0.003, 0.01)
]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "maml": [
        {},
        {"inner_lr": 1.5},
        {"inner_lr": 6.0},
        {"meta_lr": 0.01},
        {"grad_clip": 0.05},
        {"estimator": "lvc"},
        {"inner_steps": 2, "shots": EPISODES // 2},
    ],
    "all": _PLAINS,
    "average": [{**plain, "data": "cartpole"} for plain in _PLAINS],
}
"""What each policy may be trained with: values beside those of `BASE`."""

ROWS = {
    "maml after": "MAML, adapted",
    "maml before": "MAML, before",
    "all before": "pre-trained on all tasks",
    "all after": "the same, fine-tuned",
    "average before": "pre-trained on the average task",
    "average after": "the same, fine-tuned",
}
RESAMPLES = 2000


class Adaptation(NamedTuple):
    """Policy-gradient steps that share out `EPISODES`."""

    steps: int
    rate: float


class Job(NamedTuple):
    """A training, and what is to be measured after it.

    Attributes:
        policy: A key of `SETTINGS`.
        setting: Its place there.
        seed: Of the training.
        data: The data set that is adapted to, and that MAML and "all" learn from.
        iterations: Of the outer loop.
        split, ids: The tasks to measure on.
        adaptations: How it is adapted to them.
    """

    policy: str
    setting: int
    seed: int
    data: str
    iterations: int
    split: str
    ids: torch.Tensor
    adaptations: tuple[Adaptation, ...]


def main() -> None:
    """Choose, train and measure; write and print what came of it."""
    own = _parse()
    record: dict[str, Any] = {
        "hardware": describe(threads=1), "data": own.data,
        "base": BASE | {"iterations": own.iterations}, "settings": SETTINGS,
        "seeds": [*MEASURED[: own.seeds]], "test_ids": [int(TEST[0]), int(TEST[-1])],
        "trials": [], "chosen": {}, "measured": [],
    }  # fmt: skip
    record = begun(own.json, record, ("data", "base", "settings", "seeds", "test_ids"))
    every = tuple(Adaptation(steps, rate) for steps in STEPS for rate in RATES)
    trials = [
        Job(policy, setting, seed, own.data, own.iterations, "validation", VALIDATION, every)
        for policy, settings in SETTINGS.items()
        for setting in range(len(settings))
        for seed in CHOOSING
    ]
    _run(trials, "trials", record, own)
    record["chosen"] = {policy: choose(record["trials"], policy) for policy in SETTINGS}
    final = [
        Job(policy, chosen["setting"], seed, own.data, own.iterations, "test", TEST,
            (Adaptation(chosen["steps"], chosen["rate"]),))
        for seed in record["seeds"]
        for policy, chosen in record["chosen"].items()
    ]  # fmt: skip
    _run(final, "measured", record, own)
    print(table(record))


def _run(jobs: list[Job], part: str, record: dict[str, Any], own: argparse.Namespace) -> None:
    """Do the jobs that ``record[part]`` lacks, some at a time; write it after each."""
    names = ("policy", "setting", "seed")
    done = {tuple(row[name] for name in names) for row in record[part]}
    left = [job for job in jobs if job[: len(names)] not in done]
    # Spawned: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(own.processes, mp_context=context) as pool:
        running = {pool.submit(_done, job): job for job in left}
        for at, future in enumerate(as_completed(running), start=1):
            job = running[future]
            found = future.result()
            record[part].append(dict(zip(names, job, strict=False)) | found)
            write(own.json, record)
            means = {name: round(float(np.mean(each)), 1) for name, each in found.items()}
            best = max(means, key=lambda name: means[name])
            print(f"{part} {at}/{len(left)}: {job.policy} {SETTINGS[job.policy][job.setting]} "
                  f"seed {job.seed}: before {means['before']}, best {means[best]} ({best})",
                  flush=True)  # fmt: skip


def _done(job: Job) -> dict[str, list[float]]:
    """Train; return the return in each task, before adaptation and after each of several."""
    values = BASE | {"data": job.data, "seed": job.seed, "iterations": job.iterations}
    values |= SETTINGS[job.policy][job.setting]
    training = {"eval_every": 0, "test_tasks": 0, "logger": "none", "threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        config = with_values(PRESET, **values, **training, run_dir=str(run))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if Trainer(config).run():
                raise RuntimeError(f"the training of {values} failed")
        params = checkpoint.load(checkpoint.last_checkpoint(run))["model"]
    # All are measured on the same tasks, whatever they were trained on.
    config = with_values(config, data=job.data, seed=0)
    found = {"before": _returns(config, params, job, None)}
    for each in job.adaptations:
        found[f"{each.steps} × {each.rate:g}"] = _returns(config, params, job, each)
    return found


def _returns(config: Config, params: Params, job: Job, how: Adaptation | None) -> list[float]:
    """Return each task's return: of the policy as it is, or adapted."""
    # Of no steps the sampler still wants to know how many episodes they have.
    values: dict[str, Any] = {"eval_inner_steps": 0, "shots": 1}
    if how is not None:
        values = {"eval_inner_steps": how.steps, "inner_steps": how.steps, "inner_lr": how.rate}
        values["shots"] = EPISODES // how.steps
    worker = Worker(with_values(config, **values), torch.device("cpu"), trains=False)
    rows = worker.evaluate(params, job.split, job.ids, worker.learner)
    found: list[float] = rows[:, worker.evaluation_names.index("return")].tolist()
    return found


def choose(trials: list[dict[str, Any]], policy: str) -> dict[str, Any]:
    """Return the setting, and how to adapt, of the greatest mean over tasks and seeds."""
    scores: dict[tuple[int, int, float], list[float]] = {}
    for trial in trials:
        for steps in STEPS:
            for rate in RATES:
                if trial["policy"] == policy:
                    found = trial[f"{steps} × {rate:g}"]
                    scores.setdefault((trial["setting"], steps, rate), []).extend(found)
    best = max(scores, key=lambda key: float(np.mean(scores[key])))
    return {
        **dict(zip(("setting", "steps", "rate"), best, strict=True)),
        "trained_with": SETTINGS[policy][best[0]],
        "validation": float(np.mean(scores[best])),
    }


def interval(scores: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the interquartile mean of ``[seeds, tasks]``, and its 95 % interval's two ends.

    Seeds and tasks are both drawn anew, as wholes. arXiv:2108.13264 draws seeds within each task,
    as if runs on different tasks were different runs. Here one trained policy is measured on all
    tasks, so that would hide how much seeds differ.
    """
    generator = np.random.default_rng(0)
    n_seeds, n_tasks = scores.shape
    seeds = generator.integers(n_seeds, size=(RESAMPLES, n_seeds, 1))
    tasks = generator.integers(n_tasks, size=(RESAMPLES, 1, n_tasks))
    return _ends(scores, scores[seeds, tasks])


def stratified(scores: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the same, with seeds drawn anew within each task: arXiv:2108.13264's interval."""
    generator = np.random.default_rng(0)
    n_seeds, n_tasks = scores.shape
    seeds = generator.integers(n_seeds, size=(RESAMPLES, n_seeds, n_tasks))
    return _ends(scores, scores[seeds, np.arange(n_tasks)])


def _ends(scores: NDArray[np.float64], drawn: NDArray[np.float64]) -> tuple[float, float, float]:
    means = stats.trim_mean(drawn.reshape(len(drawn), -1), 0.25, axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(stats.trim_mean(scores, 0.25, axis=None)), float(low), float(high)


def returns(record: dict[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Return what was measured, ``[seeds, tasks]`` by `ROWS`."""
    found = {}
    for policy, chosen in record["chosen"].items():
        after = f"{chosen['steps']} × {chosen['rate']:g}"
        rows = sorted((r for r in record["measured"] if r["policy"] == policy), key=_seed)
        found[f"{policy} before"] = np.array([row["before"] for row in rows])
        found[f"{policy} after"] = np.array([row[after] for row in rows])
    return {name: found[name] for name in ROWS}


def _seed(row: dict[str, Any]) -> int:
    return int(row["seed"])


def table(record: dict[str, Any], part: str = "measured") -> str:
    """Return the record as Markdown: what was ``measured``, or what was ``chosen``."""
    if part == "chosen":
        return _chosen(record)
    cells = []
    for name, row in ROWS.items():
        scores = returns(record)[name]
        shown = [
            f"{mean:.1f} [{low:.1f}, {high:.1f}]"
            for mean, low, high in (interval(scores), stratified(scores))
        ]
        of_seeds = scores.mean(1)
        cells.append([row, *shown, f"{of_seeds.min():.1f} to {of_seeds.max():.1f}"])
    n_seeds, n_tasks = scores.shape
    head = [f"return, {n_seeds} seeds × {n_tasks} tasks", "seeds drawn within tasks"]
    return grid(["policy", *head, "means of seeds"], cells)


def _chosen(record: dict[str, Any]) -> str:
    cells = []
    for policy, chosen in record["chosen"].items():
        trials = sum(trial["policy"] == policy for trial in record["trials"])
        how = f"{chosen['steps']} × {chosen['rate']:g}"
        cells.append([
            policy, str(trials), str(len(STEPS) * len(RATES)), _named(chosen["trained_with"]),
            how, f"{chosen['validation']:.1f}",
        ])  # fmt: skip
    head = ["trainings", "adaptations each", "chosen, beside `BASE`", "steps × rate"]
    return grid(["policy", *head, "validation return"], cells)


def _named(values: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in values.items()) or "–"


def _parse() -> argparse.Namespace:
    parser = command_line("adaptation", __doc__)
    parser.add_argument("--data", default=PRESET.data, help=f"tasks (default: {PRESET.data})")
    parser.add_argument("--seeds", type=count, default=len(MEASURED), help="at most 10")
    parser.add_argument("--iterations", type=count, default=BASE["iterations"])
    parser.add_argument("--processes", type=count, default=2, help="trainings at a time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
