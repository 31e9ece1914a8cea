"""What the inner loop does: the test score after each step."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from maml.library.model import Model
from maml.plots import style
from maml.plots.curves import line_of_seeds
from maml.plots.style import GREY


def scores_by_step(model: Model, steps: Sequence[int], tasks: int) -> tuple[str, list[list[float]]]:
    """Return the metric's name, and each test task's score after each number of inner steps.

    Args:
        model: The model; its scores are normalised as its run's headline.
        steps: How many inner steps.
        tasks: How many test tasks, from the first on.
    """
    learner, config = model.learner, model.config
    episodes = learner.open_tasks("test", evaluation=True)
    prefix = "" if config.transductive else "non_transductive_"
    metric = "accuracy" if "accuracy" in learner.metric_names else "loss"
    found: list[list[float]] = [[] for _ in steps]
    batches = torch.arange(tasks).split(config.task_batch)
    for ids in tqdm(batches, desc="scoring", unit="batch", leave=False):
        batch = episodes.tasks(ids)
        for at, n in zip(found, steps, strict=True):
            predictions = learner.predictions(model.meta_params, batch, n)
            at += learner.scores(predictions, batch.query_y)[prefix + metric].tolist()
    return metric, found


def by_step(methods: Mapping[str, Sequence[Model]], tasks: int) -> Any:
    """Draw the test score after each number of inner steps, by method and seed.

    The steps of training and of the run's own test are marked where they are the same for all.

    Returns:
        The figure.
    """
    configs = [model.config for models in methods.values() for model in models]
    marked = [steps for c in configs for steps in (c.inner_steps, c.eval_inner_steps)]
    # Up to 20, and those of the runs themselves, however many they are.
    steps = sorted({*range(min(max(5, 2 * max(marked)), 20) + 1), *marked})
    looks = style.look_of(list(methods))
    drawn, ((axis,),) = style.figure(size=(6.0, 4.0))
    metric = "accuracy"
    for name, models in methods.items():
        each = [scores_by_step(model, steps, tasks) for model in models]
        metric = each[0][0]
        means = [[fmean(at) for at in of_run] for _, of_run in each]
        line_of_seeds(axis, steps, means, looks[name], name)
    for what, field, dash in (("training", "inner_steps", ":"), ("test", "eval_inner_steps", "--")):
        values = {getattr(config, field) for config in configs}
        if len(values) == 1:
            axis.axvline(values.pop(), color=GREY, linestyle=dash, label=f"steps in {what}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    style.finish(axis, "inner steps", f"test {metric}", metric=metric)
    return drawn
