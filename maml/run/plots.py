"""``curves.png``: what a run learned, drawn from metrics.jsonl."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from datasets.tasks import Task
from maml.config import Config, registry
from maml.learners.policy import Policy
from maml.params import Params
from maml.run.files import write_bytes
from maml.run.filmstrip import draw_filmstrip
from maml.run.log import Row, read_metrics
from maml.worker import Worker

BLUE, ORANGE, GREY = "#3465a4", "#e07b00", "#888888"


def draw_curves(
    run_dir: Path, config: Config, result: dict[str, Any], worker: Worker, meta_params: Params
) -> Path:
    """Draw loss and accuracy against iterations; of regression, loss and an adapted curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_metrics(run_dir / "metrics.jsonl")
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    batches = registry.learner(config.learner).tasks == "batches"
    of = "mini-batches" if batches else "tasks"
    _curve(axes[0], rows, result, "loss", of)
    if "accuracy" in worker.metric_names:
        _curve(axes[1], rows, result, "accuracy", of)
    elif "return" in worker.metric_names:
        _curve(axes[1], rows, result, "return", of)
        _count_episodes(axes[1], worker)
    else:
        axes[0].set_yscale("log")
        _adapted_curve(axes[1], worker, meta_params)
    if batches:
        for axis in axes:
            # No query is told from a support example here.
            axis.set_ylabel(axis.get_ylabel().removeprefix("query "))
            axis.set_xlabel("iteration")
    figure.suptitle(config.preset, fontsize=11)
    path = run_dir / "curves.png"
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    plt.close(figure)
    write_bytes(path, picture.getvalue())
    if "return" in worker.metric_names:
        draw_filmstrip(run_dir, worker, meta_params)
    return path


def _curve(axis: Any, rows: list[Row], result: dict[str, Any], name: str, of: str) -> None:
    training = [(row["iteration"], row[name]) for row in rows if "split" not in row and name in row]
    validation = [row for row in rows if row.get("split") == "validation"]
    # The rows hold both; drawn is what the test's headline is.
    headline = "" if result["transductive"] else "non_transductive_"
    if training:
        iterations, values = zip(*training, strict=True)
        axis.plot(iterations, values, color=BLUE, alpha=0.25, linewidth=0.8)
        axis.plot(iterations, _smooth(values), color=BLUE, label=f"training {of}, smoothed")
    if validation:
        axis.errorbar(
            [row["iteration"] for row in validation],
            [row[headline + name] for row in validation],
            yerr=[row[f"{headline}{name}_ci95"] or 0.0 for row in validation],
            color=ORANGE,
            marker="o",
            markersize=3,
            capsize=2,
            label="validation, 95 % interval",
        )
    if result.get(name) is not None:
        shown = f"{100 * result[name]:.1f} %" if name == "accuracy" else f"{result[name]:.3g}"
        axis.axhline(result[name], color=GREY, linestyle="--", label=f"test: {shown}")
    axis.set_xlabel("outer-loop iteration")
    axis.set_ylabel(f"query {name}")
    axis.grid(alpha=0.25)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _count_episodes(axis: Any, worker: Worker) -> None:
    """Say, above iterations, how many episodes of acting they are."""
    learner, config = worker.learner, worker.config
    assert isinstance(learner, Policy)
    support, queries = learner.episodes(evaluation=False)
    each = config.meta_batch_size * (support * config.inner_steps + queries)
    above = axis.secondary_xaxis("top", functions=(lambda x: x * each, lambda x: x / each))
    above.set_xlabel("episodes, the first of each environment")


def _smooth(values: tuple[float, ...]) -> list[float]:
    """Exponential average, unbiased at the start, over about a thirtieth of the rows."""
    share = min(1.0, 30 / len(values))
    smooth, total, weight = [], 0.0, 0.0
    for value in values:
        total = (1 - share) * total + share * value
        weight = (1 - share) * weight + share
        smooth.append(total / weight)
    return smooth


def _adapted_curve(axis: Any, worker: Worker, meta_params: Params) -> None:
    """Draw one test task before and after 1 and 5 inner steps (Finn et al., figure 2).

    Of a function of more than one number there is no such curve.
    """
    import torch

    learner = worker.learner
    task = worker.evaluation("test").tasks(torch.arange(1))
    if task.query_x.shape[2:] != (1,) or task.query_y.shape[2:] != (1,):
        axis.set_axis_off()
        return
    support_x, support_y = task.support_x[0], task.support_y[0]
    params = {name: tensor.cpu() for name, tensor in meta_params.items()}
    points = torch.cat([task.support_x, task.query_x], dim=1)
    x = torch.linspace(float(points.min()), float(points.max()), 201, dtype=worker.dtype)[:, None]
    styles = {
        0: ("before adapting", GREY, ":"),
        1: ("1 step", ORANGE, "--"),
        5: ("5 steps", BLUE, "-"),
    }
    for steps, (label, color, style) in styles.items():
        adapted = learner.adapted(params, Task(*(tensor[0] for tensor in task)), steps)
        y = learner.call_network(adapted, x)[0].detach()
        axis.plot(x[:, 0], y[:, 0], color=color, linestyle=style, label=label)
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
    axis.set_xlabel("x")
    axis.set_ylabel("y")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7)
