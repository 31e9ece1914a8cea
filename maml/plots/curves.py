"""Draw curves: of one finished run, of many runs by method and seed, of scores by inner steps."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from datasets.tasks import Task
from datasets.words import counted
from maml.config import Config, registry
from maml.config.presets import title
from maml.evaluation.scores import after_steps, answers
from maml.learners import Learner
from maml.library.model import Model
from maml.metagradient import by_task
from maml.params import Params
from maml.plots import style
from maml.plots.style import BLUE, GREY, ORANGE
from maml.run.files import headline, read_rows
from maml.run.log import Row
from maml.run.reading import Run, history
from maml.worker import Worker

STEPS_OF_FIT = (0, 1, 5)


def draw_curves(
    run_dir: Path, config: Config, result: dict[str, Any], worker: Worker, meta_params: Params
) -> Path:
    """Draw loss and accuracy (or return); for regression, draw loss and an adapted curve."""
    from matplotlib.ticker import LogFormatter

    rows = read_rows(run_dir / "metrics.jsonl")
    figure, ((*axes,),) = style.figure(1, 2, (5.0, 3.8))
    batches = registry.learner(config.learner).tasks == "batches"
    _curve(axes[0], rows, result, "loss", batches)
    metric = headline(worker.metric_names)
    if metric != "loss":
        _curve(axes[1], rows, result, metric, batches)
    else:
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_formatter(LogFormatter())
        axes[0].yaxis.set_minor_formatter(LogFormatter())
        adapted_curve(axes[1], worker, meta_params)
    figure.suptitle(title(config))
    return style.save(figure, run_dir / "curves", pdf=False)


def _curve(axis: Any, rows: list[Row], result: dict[str, Any], name: str, batches: bool) -> None:
    """Draw one metric: in training (over tasks or mini-batches), in validations and in the test."""
    training = history(rows, f"train/{name}")
    # The rows hold both variants of a metric. Draw the variant of the test's headline.
    of_headline = f"validation/{'' if result['transductive'] else 'non_transductive_'}{name}"
    validation, errors = history(rows, of_headline), history(rows, f"{of_headline}_ci95")
    if training:
        iterations, values = [*training], [*training.values()]
        axis.plot(iterations, values, color=BLUE, alpha=0.25, linewidth=0.8)
        of = "mini-batches" if batches else "tasks"
        mark, label = "." * (len(values) == 1), f"training {of}, smoothed"
        axis.plot(iterations, style.smooth(values), color=BLUE, marker=mark, label=label)
    if validation:
        axis.errorbar(
            [*validation],
            [*validation.values()],
            yerr=[errors.get(iteration, 0.0) for iteration in validation],
            color=ORANGE, marker="o", markersize=3, capsize=2, label="validation, 95 % interval",
        )  # fmt: skip
    if result.get(name) is not None:
        shown = f"{100 * result[name]:.1f} %" if name == "accuracy" else f"{result[name]:.3g}"
        axis.axhline(result[name], color=GREY, linestyle="--", label=f"test: {shown}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    # A mini-batch does not separate queries from support examples.
    x, y = ("iteration", name) if batches else ("outer-loop iteration", f"query {name}")
    style.finish(axis, x, y, metric=name)


def adapted_curve(axis: Any, worker: Worker, meta_params: Params) -> None:
    """Draw the fit to the first test task after 0, 1 and 5 inner steps (Finn et al., figure 2)."""
    first = torch.tensor([0])
    task = next(by_task.one_by_one(worker.evaluation("test").tasks(first)))
    params = {name: tensor.detach().to(worker.device) for name, tensor in meta_params.items()}
    points = torch.cat([task.support_x, task.query_x], dim=1)
    x = torch.linspace(float(points.min()), float(points.max()), 201, dtype=points.dtype)

    def fits(own: Learner, task: Task) -> Tensor:
        at = x[None, :, None].to(worker.device)
        asked = task._replace(query_x=at, query_y=torch.zeros_like(at))
        return torch.stack([answers(own, params, asked, n)[0] for n in STEPS_OF_FIT])

    fitted = None
    if task.query_x.shape[2:] == task.query_y.shape[2:] == (1,):
        (fitted,) = worker.evaluated("test", first, fits)
    if fitted is None or fitted.shape[1:] != (len(x), 1):
        axis.set_axis_off()
        return
    looks = ((GREY, ":"), (ORANGE, "--"), (BLUE, "-"))
    for steps, y, (color, dash) in zip(STEPS_OF_FIT, fitted.cpu(), looks, strict=True):
        axis.plot(x, y[:, 0], color=color, linestyle=dash, label=counted(steps, "inner step"))
    one = Task(*(tensor[0] for tensor in task))
    axis.plot(one.query_x[:, 0], one.query_y[:, 0], ".", color=GREY, label="queries", zorder=0)
    axis.plot(one.support_x[:, 0], one.support_y[:, 0], "^", color="black", label="support")
    style.finish(axis, "x", "y")


def learning_curves(methods: Mapping[str, Sequence[Run]]) -> Any:
    """Return a figure of each method's validations (else smoothed training) and their mean."""
    runs = [run for of_method in methods.values() for run in of_method]
    metric = headline({"loss", *(name for run in runs for row in run.rows for name in row)})
    validates = any(_validated(run, metric) for run in runs)
    of = "validation" if validates else "training"
    drawn, ((axis,),) = style.figure(size=(6.0, 4.0))
    looks = style.look_of(list(methods))
    for name, of_method in methods.items():
        curve = _validated if validates else _smoothed
        by_seed = [curve(run, metric) for run in of_method]
        # Runs may be unfinished. Draw the iterations that all have reached, to average over all.
        whole = sorted(set.intersection(*map(set, by_seed)))
        if whole:
            values = [[of_run[i] for i in whole] for of_run in by_seed]
            line_of_seeds(axis, whole, values, looks[name], name)
        else:
            line = f"left out of the curves: {name}: no {of} row that all its runs have"
            print(line, file=sys.stderr, flush=True)
    axis.xaxis.get_major_locator().set_params(integer=True)
    style.finish(axis, "outer-loop iteration", f"{of} {metric}", metric=metric)
    return drawn


def _validated(run: Run, metric: str) -> dict[int, float]:
    return history(run.rows, f"validation/{run.headline}{metric}")


def _smoothed(run: Run, metric: str) -> dict[int, float]:
    logged = history(run.rows, f"train/{metric}")
    return dict(zip(logged, style.smooth([*logged.values()]), strict=True))


def line_of_seeds(
    axis: Any, x: Sequence[float], ys: Sequence[Sequence[float]], look: tuple[str, str], name: str
) -> None:
    """Draw the mean of the lines ``ys``, one per seed; draw several lines themselves, paler."""
    colour, dash = look
    means = [fmean(values) for values in zip(*ys, strict=True)]
    label = f"{name} ({len(ys)} seeds)" if len(ys) > 1 else name
    axis.plot(x, means, dash, color=colour, marker=".", label=label)
    for values in ys if len(ys) > 1 else []:
        axis.plot(x, values, dash, color=colour, alpha=0.4, linewidth=0.8)


def scores_by_step(model: Model, steps: Sequence[int], tasks: int) -> tuple[str, list[list[float]]]:
    """Return the metric's name, and test tasks' scores after each number of inner steps."""
    worker = Worker(model.config, model.device, trains=False)
    batches, rows = torch.arange(tasks).split(model.config.task_batch), list[Tensor]()
    for ids in tqdm(batches, desc="scoring", unit="batch", leave=False):
        metric, scores = after_steps(worker, model.meta_params, "test", ids, steps)
        rows.append(scores)
    return metric, torch.cat(rows).T.tolist()


def by_step(methods: Mapping[str, Sequence[Model]], tasks: int) -> Any:
    """Return a figure of the test score after each number of inner steps, by method and seed."""
    configs = [model.config for models in methods.values() for model in models]
    marked = [steps for c in configs for steps in (c.inner_steps, c.eval_inner_steps)]
    # Draw up to 20 steps, and always the runs' own numbers of steps, even above 20.
    steps = sorted({*range(min(max(5, 2 * max(marked)), 20) + 1), *marked})
    looks = style.look_of(list(methods))
    drawn, ((axis,),) = style.figure(size=(6.0, 4.0))
    metric = "accuracy"
    for name, models in methods.items():
        by_seed = [scores_by_step(model, steps, tasks) for model in models]
        metric = by_seed[0][0]
        means = [[fmean(at) for at in of_run] for _, of_run in by_seed]
        line_of_seeds(axis, steps, means, looks[name], name)
    for what, field, dash in (("training", "inner_steps", ":"), ("test", "eval_inner_steps", "--")):
        values = {getattr(config, field) for config in configs}
        if len(values) == 1:
            axis.axvline(values.pop(), color=GREY, linestyle=dash, label=f"steps in {what}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    style.finish(axis, "inner steps", f"test {metric}", metric=metric)
    return drawn
