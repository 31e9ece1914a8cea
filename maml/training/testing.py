"""Evaluate a run: validations during training, the test at the end, and pictures of both."""

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from maml.config import registry
from maml.config.presets import changed, published_row
from maml.evaluation import scores
from maml.evaluation.best import BestModel
from maml.params import Params
from maml.plots.curves import draw_curves
from maml.run.files import TESTED, headline, read_rows, write_tasks
from maml.training.run import Run
from maml.worker import Worker

TASKS = 16
"""Validation tasks that are scored after each inner step: enough to see if adapting helps."""
STEPS = 10
"""With more inner steps than this, only three counts are scored: none, half of them, all."""


class Validations:
    """Validates a run, in every driving process; keeps its ``best`` model if the test needs it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.best = BestModel(transductive=run.config.transductive)

    def recall(self) -> bool:
        """Use a validation logged after this iteration's checkpoint; return whether one exists."""
        run = self._run
        rows = read_rows(run.dir / "metrics.jsonl") if run.speaks else []
        wanted = ("validation", run.iteration)
        here = (row for row in rows if (row.get("split"), row["iteration"]) == wanted)
        found = run.strategy.from_rank_zero(next(here, None))
        if found is not None:
            self._offer(found)
        return found is not None

    def validate(self, bar: Any, heed_stop: Callable[[], None]) -> None:
        """Validate; call ``heed_stop`` before each round of tasks."""
        run, config = self._run, self._run.config
        result = scores.evaluate(
            run.strategy, run.params, "validation", config.eval_tasks, between=heed_stop
        )
        self._offer(result)
        if run.speaks and registry.learner(config.learner).tasks == "episodes":
            params = {n: p.detach().to(run.worker.device) for n, p in run.params.items()}
            result |= _after(run.worker, params) | _rates(run.worker, params)
        run.write(result)
        if run.speaks:
            line = scores.summary(result, config, config.transductive)
            bar.write(f"iteration {run.iteration}: {line}", file=sys.stderr)

    def _offer(self, validation: dict[str, Any]) -> None:
        run = self._run
        if run.config.test_model == "best":
            with run.changing:
                self.best.offer(validation, run.iteration, run.params)

    @property
    def enough(self) -> bool:
        """Whether the last ``--stop-after`` validations have found no better model."""
        run, config, best = self._run, self._run.config, self.best.iteration
        if not config.stop_after or best is None:
            return False
        return run.iteration - best >= config.stop_after * config.eval_every

    def chosen(self) -> tuple[int, Params]:
        """Return the iteration and the parameters of the model to test."""
        if self.best.iteration is None:
            return self._run.iteration, self._run.params
        return self.best.iteration, self.best.model


def _after(worker: Worker, params: Params) -> dict[str, Any]:
    """Return the mean accuracy (for regression the loss) of `TASKS` tasks, by inner steps."""
    most = worker.config.eval_inner_steps
    if not most:
        return {}
    steps = range(most + 1) if most <= STEPS else (0, most // 2, most)
    _, each = scores.after_steps(worker, params, "validation", torch.arange(TASKS), steps)
    return {"after": dict(zip(map(str, steps), each.mean(0).tolist(), strict=True))}


def _rates(worker: Worker, params: Params) -> dict[str, Any]:
    """Return the mean of each tensor's learned inner rates, by step and name."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
    problem = worker.learner.problem(leaves, max(1, worker.config.inner_steps))
    # Rates that depend on no meta-parameter keep their given values, so they are not logged.
    if not any(rate.requires_grad for of_step in problem.rates or () for rate in of_step.values()):
        return {}
    return {
        "rates": {
            f"{step}/{name}": problem.lr * float(rate.mean().detach())
            for step, of_step in enumerate(problem.rates or (), 1)
            for name, rate in of_step.items()
        }
    }


def test(run: Run, tested: tuple[int, Params], heed_stop: Callable[[], None]) -> dict[str, Any]:
    """Evaluate the ``tested`` model on the test split; return its entries for result.json."""
    config, (iteration, params) = run.config, tested
    n_tasks = run.iteration * config.meta_batch_size
    result: dict[str, Any] = {
        "accuracy": None, "ci95": None, "interval95": None, "tasks": config.test_tasks,
        "transductive": config.transductive, "non_transductive_accuracy": None,
        "preset": config.preset, **published_row(config),
        "changed": changed(config),
        "iterations": run.iteration,
        "tested_iteration": iteration if config.test_tasks else None,
        "seconds": run.seconds,
        "tasks_per_second": n_tasks / run.seconds if run.seconds else None,
    }  # fmt: skip
    if not config.test_tasks:
        if run.speaks:
            # Remove the scores of an earlier test, because its result is replaced.
            with contextlib.suppress(OSError):
                (run.dir / TESTED).unlink()
        return result
    values = scores.of_tasks(
        run.strategy, params, "test", config.test_tasks, progress=run.speaks, between=heed_stop
    )
    names = run.worker.evaluation_names
    averages = scores.means(values, "test", names)
    if run.speaks:
        write_tasks(run.dir, "test", config.seed, names, values.tolist())
        if (images := run.worker.evaluation("test").content()) is not None:
            result["test_images"] = images
    run.write(averages)
    run.say(scores.summary(averages, config, config.transductive))
    run.say(scores.no_answers(averages))
    # Imported here, because only a test needs scipy.
    from maml.evaluation.intervals import interval

    judged = ("" if config.transductive else "non_transductive_") + headline(names)
    ends = interval(values[:, names.index(judged)].double().numpy(), judged)
    result["interval95"] = ends if all(map(math.isfinite, ends)) else None
    return result | scores.with_headline(averages, transductive=config.transductive)


def draw(run: Run, params: Params, result: dict[str, Any]) -> None:
    """Draw the run's curves."""
    curves = draw_curves(run.dir, run.config, result, run.worker, params)
    run.say(f"run directory {run.dir}, plot {curves}")
