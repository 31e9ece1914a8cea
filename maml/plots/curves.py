"""Learning curves: of one run as it ends, of many with intervals over their seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets.episodes import Episodes
from datasets.tasks import Task
from maml.config import Config, registry
from maml.config.presets import title
from maml.evaluation.scores import headline
from maml.learners import Learner
from maml.params import Params
from maml.plots import style
from maml.plots.style import BLUE, GREY, ORANGE
from maml.run.files import read_rows
from maml.run.log import Row
from maml.run.reading import Run, history
from maml.worker import Worker


def draw_curves(
    run_dir: Path, config: Config, result: dict[str, Any], worker: Worker, meta_params: Params
) -> Path:
    """Draw loss and accuracy (or return) by iterations; of regression, loss and an adapted curve.

    Beside it, the learner's own pictures.
    """
    rows = read_rows(run_dir / "metrics.jsonl")
    figure, ((*axes,),) = style.figure(1, 2, (5.0, 3.8))
    batches = registry.learner(config.learner).tasks == "batches"
    of = "mini-batches" if batches else "tasks"
    steps = (config.inner_steps, config.eval_inner_steps)
    adapts = registry.learner(config.learner).adapts_at_test
    marked = steps if adapts and steps[0] != steps[1] else None
    _curve(axes[0], rows, result, "loss", of, marked)
    metric = headline(worker.metric_names)
    if metric != "loss":
        _curve(axes[1], rows, result, metric, of, marked)
        if metric != "accuracy":
            _count_episodes(axes[1], [config])
    else:
        axes[0].set_yscale("log")
        adapted_curve(axes[1], worker.learner, worker.evaluation("test"), meta_params)
    if batches:
        for axis in axes:
            # No query is told from a support example here.
            axis.set_ylabel(axis.get_ylabel().removeprefix("query "))
            axis.set_xlabel("iteration")
    figure.suptitle(title(config), fontsize=11)
    return style.save(figure, run_dir / "curves", ["png"])[0]


def _curve(
    axis: Any,
    rows: list[Row],
    result: dict[str, Any],
    name: str,
    of: str,
    steps: tuple[int, int] | None,
) -> None:
    """Draw one metric; ``steps``: inner steps in training and at test, where they differ."""
    trained, tested = ("", "")
    if steps is not None:
        trained, tested = (f", {n} inner step{'s' * (n != 1)}" for n in steps)
    training = [(row["iteration"], row[name]) for row in rows if "split" not in row and name in row]
    validation = [row for row in rows if row.get("split") == "validation"]
    # The rows hold both; drawn is what the test's headline is.
    headline = "" if result["transductive"] else "non_transductive_"
    if training:
        iterations, values = zip(*training, strict=True)
        axis.plot(iterations, values, color=BLUE, alpha=0.25, linewidth=0.8)
        axis.plot(
            iterations, style.smooth(values), color=BLUE, label=f"training {of}{trained}, smoothed"
        )
    if validation:
        axis.errorbar(
            [row["iteration"] for row in validation],
            [row[headline + name] for row in validation],
            yerr=[row[f"{headline}{name}_ci95"] or 0.0 for row in validation],
            color=ORANGE,
            marker="o",
            markersize=3,
            capsize=2,
            label=f"validation{tested}, 95 % interval",
        )
    if result.get(name) is not None:
        shown = f"{100 * result[name]:.1f} %" if name == "accuracy" else f"{result[name]:.3g}"
        axis.axhline(result[name], color=GREY, linestyle="--", label=f"test{tested}: {shown}")
    style.finish(axis, "outer-loop iteration", f"query {name}", metric=name)


def _count_episodes(axis: Any, configs: Iterable[Config]) -> None:
    """Say, above iterations, how many episodes of acting they are, if of all as many."""
    counts = set()
    for config in configs:
        known = registry.learner(config.learner)
        # A policy of a user's own may play others.
        acts = known.tasks == "environments" and not known.is_theirs
        before = config.shots * config.inner_steps
        plays = config.queries + (before if known.adapts_at_test else 0)
        counts.add(config.meta_batch_size * plays * acts)
    each = counts.pop()
    if not counts and each:
        above = axis.secondary_xaxis("top", functions=(lambda x: x * each, lambda x: x / each))
        above.set_xlabel("episodes, the first of each environment")


def adapted_curve(axis: Any, learner: Learner, episodes: Episodes, meta_params: Params) -> None:
    """Draw the first test task before and after 1 and 5 inner steps (Finn et al., figure 2).

    Of a function of more than one number there is no such curve.
    """
    import torch

    task = episodes.tasks(torch.tensor([0]))
    if task.query_x.shape[2:] != (1,) or task.query_y.shape[2:] != (1,):
        axis.set_axis_off()
        return
    support_x, support_y = task.support_x[0], task.support_y[0]
    params = {name: tensor.cpu() for name, tensor in meta_params.items()}
    points = torch.cat([task.support_x, task.query_x], dim=1)
    x = torch.linspace(float(points.min()), float(points.max()), 201, dtype=points.dtype)[:, None]
    dashes = {
        0: ("before adapting", GREY, ":"),
        1: ("1 step", ORANGE, "--"),
        5: ("5 steps", BLUE, "-"),
    }
    for steps, (label, color, dash) in dashes.items():
        adapted = learner.adapted(params, Task(*(tensor[0] for tensor in task)), steps)
        y = learner.call_network(adapted, x)[0].detach()
        axis.plot(x[:, 0], y[:, 0], color=color, linestyle=dash, label=label)
    order = task.query_x[0, :, 0].argsort()
    axis.plot(
        task.query_x[0, order, 0],
        task.query_y[0, order, 0],
        color="black",
        alpha=0.35,
        linewidth=3,
        label="the task",
        zorder=0,
    )
    axis.plot(
        support_x[:, 0],
        support_y[:, 0],
        "^",
        color="black",
        label=f"{len(support_x)} support points",
    )
    style.finish(axis, "x", "y")


def learning_curves(methods: Mapping[str, Sequence[Run]]) -> Any:
    """Draw each method's validations: the mean over its seeds, as `line_of_seeds` says.

    Where no run has any, what was logged while training, smoothed. Policies that play as many
    episodes in an iteration have a second axis, which counts them.

    Returns:
        The figure.
    """
    runs = [run for each in methods.values() for run in each]
    metric = headline({"loss", *(name for run in runs for row in run.rows for name in row)})
    validates = any(_validated(run, metric) for run in runs)
    drawn, ((axis,),) = style.figure(size=(6.0, 4.0))
    looks = style.look_of(list(methods))
    for name, of_method in methods.items():
        at: dict[int, list[float]] = {}
        for run in of_method:
            if validates:
                values = _validated(run, metric)
            else:
                logged = history(run.rows, f"train/{metric}")
                values = dict(zip(logged, style.smooth([*logged.values()]), strict=True))
            for iteration, value in values.items():
                at.setdefault(iteration, []).append(value)
        # Where runs are under way, only what all of them have reached is a mean of them all.
        whole = sorted(i for i, values in at.items() if len(values) == len(of_method))
        if not whole:
            continue
        each = [[at[i][j] for i in whole] for j in range(len(of_method))]
        line_of_seeds(axis, whole, each, looks[name], name)
    axis.xaxis.get_major_locator().set_params(integer=True)
    if metric.endswith("return"):
        _count_episodes(axis, [run.config for run in runs])
    y = f"{'validation' if validates else 'training'} {metric}"
    style.finish(axis, "outer-loop iteration", y, metric=metric)
    return drawn


def _validated(run: Run, metric: str) -> dict[int, float]:
    return history(run.rows, f"validation/{run.headline}{metric}")


def line_of_seeds(
    axis: Any,
    x: Sequence[float],
    each: Sequence[Sequence[float]],
    look: tuple[str, str],
    name: str,
    alone: str = "1 seed",
) -> None:
    """Draw the mean of lines, one a seed, with Student's 95 % interval; of two, both lines instead.

    The interval of two is 13 standard errors wide: true, and no picture. ``alone`` is what the
    legend says of a line of one seed.
    """
    colour, dash = look
    many = f"mean of {len(each)} seeds" + ", 95 %" * (len(each) > 2)
    label = f"{name} ({many if len(each) > 1 else alone})"
    spread = [mean_and_spread(values) for values in zip(*each, strict=True)]
    axis.plot(x, [mean for mean, _ in spread], dash, color=colour, marker=".", label=label)
    if len(each) == 2:
        for values in each:
            axis.plot(x, values, dash, color=colour, alpha=0.4, linewidth=0.8)
    elif len(each) > 2:
        low, high = ([mean + sign * half for mean, half in spread] for sign in (-1, 1))
        axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the half-width of Student's 95 % interval; of one value that is 0."""
    import numpy as np

    many = np.asarray(values, dtype=np.float64)
    if len(many) < 2:
        return float(many.mean()), 0.0
    from scipy import stats

    t = stats.t.ppf(0.975, len(many) - 1)
    return float(many.mean()), float(t * many.std(ddof=1) / len(many) ** 0.5)
