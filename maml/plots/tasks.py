"""One task: its images with what was answered, and where they lie before and after adapting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from datasets.tasks import Task
from datasets.words import counted
from maml.config import registry
from maml.library.model import Model
from maml.plots import style
from maml.plots.curves import adapted_curve
from maml.plots.style import BLUE, ORANGE

LONGEST = 12
"""Letters of a class's name that there is room for."""
SHOWN = 6
"""So many queries a class are shown, and so many of its support examples."""


def task_of(model: Model, index: int) -> tuple[Task, list[str]]:
    """Return a test task of the model's run, with a leading dimension of 1, and its classes.

    They have the data set's own names where it has some, else "class 1" and so on.
    """
    episodes = model.episodes("test").episodes
    ids = torch.tensor([index])
    known = episodes.names(ids)
    if known is None:
        return episodes.tasks(ids), [f"class {c + 1}" for c in range(model.ways or 0)]
    # The last part of a path; the beginning of a long name.
    short = [name.rpartition("/")[2] for name in known[0]]
    return episodes.tasks(ids), [n if len(n) <= LONGEST else f"{n[: LONGEST - 1]}…" for n in short]


def panel(model: Model, index: int = 0) -> Any:
    """Draw a test task: a row a class, its support images, then its queries with the answers.

    A right answer has a blue frame and a tick, a wrong one an orange frame, a cross and the class
    that was answered.

    Returns:
        The figure; None for a regression, or what is no image.
    """
    if model.ways is None or model.image_shape is None:
        return None
    task, classes = task_of(model, index)
    config = model.config
    found = model.learner.predictions(model.meta_params, task, config.eval_inner_steps)
    outputs = found.transductive if config.transductive else found.non_transductive
    answers, truth = outputs[0].argmax(-1), task.query_y[0]
    ways = model.ways
    support = [task.support_x[0][task.support_y[0] == c][:SHOWN] for c in range(ways)]
    queries = [(truth == c).nonzero()[:SHOWN, 0] for c in range(ways)]
    left, right = max(map(len, support)), max(map(len, queries))
    drawn, axes = style.figure(ways, left + 1 + right, (0.9, 0.95))
    for axis in axes.flat:
        axis.set_axis_off()
    for c in range(ways):
        axes[c, left].text(0.5, 0.5, classes[c], ha="center", va="center", fontsize=8)
        for i, image in enumerate(support[c]):
            _show(axes[c, i], image)
        for i, query in enumerate(queries[c].tolist()):
            axis, answer = axes[c, left + 1 + i], int(answers[query])
            _show(axis, task.query_x[0, query])
            axis.set_axis_on()
            axis.set(xticks=[], yticks=[])
            for side in axis.spines.values():
                side.set(color=BLUE if answer == c else ORANGE, linewidth=3)
            said = "✓" if answer == c else f"✗ {classes[answer].removeprefix('class ')}"
            axis.set_title(said, fontsize=8, color=BLUE if answer == c else ORANGE, pad=3)
    accuracy = float((answers == truth).float().mean())
    way = "transductive" if config.transductive else "non-transductive"
    drawn.suptitle(
        f"test task {index}: support left, queries right; {100 * accuracy:.0f} % of {len(truth)} "
        f"queries right{_after(model)} ({way})",
        fontsize=9,
    )
    return drawn


def _show(axis: Any, image: Tensor) -> None:
    pixels = image.float().clamp(0, 1).permute(1, 2, 0)
    axis.imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)


def embedding(model: Model, index: int = 0) -> Any:
    """Draw what the output layer sees of a task's images, before and after adapting.

    Two principal components of each; above is how much of the variance lies between classes.

    Returns:
        The figure; None for a regression, or where the network does not say what its head is.
    """
    if model.ways is None or getattr(model.learner.network, "head_prefix", None) is None:
        return None
    tasks, _ = task_of(model, index)
    task = Task(*(part[0] for part in tasks))
    steps = model.config.eval_inner_steps
    looks = list(style.look_of([f"class {c}" for c in range(model.ways)]).values())
    looked_at = (0, steps) if _adapts(model) else (0,)
    drawn, ((*axes,),) = style.figure(1, len(looked_at), (4.2, 4.0))
    for axis, n in zip(axes, looked_at, strict=True):
        params = {
            k: v.detach() for k, v in model.learner.adapted(model.meta_params, task, n).items()
        }
        support, queries = _features(model, params, task)
        both = torch.cat([support, queries]).double()
        labels = torch.cat([task.support_y, task.query_y])
        centred = both - both.mean(0)
        _, _, directions = torch.linalg.svd(centred, full_matrices=False)
        places = centred @ directions[:2].T
        between = sum(
            int((labels == c).sum()) * float(centred[labels == c].mean(0).square().sum())
            for c in range(model.ways)
        )
        share = between / max(float(centred.square().sum()), 1e-30)
        for c in range(model.ways):
            colour = looks[c][0]
            mine = task.support_y == c
            axis.scatter(
                *places[: len(support)][mine].T, marker="*", s=110, color=colour,
                edgecolors="black", linewidths=0.7, zorder=3,
            )  # fmt: skip
            mine = task.query_y == c
            axis.scatter(*places[len(support) :][mine].T, s=16, color=colour, alpha=0.75)
        when = f"after {counted(n, 'inner step')}: " if n else "before adapting: "
        when = when if _adapts(model) else ""
        axis.set_title(f"{when}{100 * share:.0f} % between classes", fontsize=9)
        axis.set(xticks=[], yticks=[], xlabel="first component", ylabel="second component")
    seen = "what the output layer sees" if _adapts(model) else "features"
    drawn.suptitle(
        f"test task {index}, {seen}; stars: support, dots: queries, a colour a class",
        fontsize=9,
        wrap=True,
    )
    return drawn


def _adapts(model: Model) -> bool:
    return registry.learner(model.config.learner).adapts_at_test


def _after(model: Model) -> str:
    steps = counted(model.config.eval_inner_steps, "inner step")
    return f" after {steps}" if _adapts(model) else ""


@torch.no_grad()
def _features(model: Model, params: dict[str, Tensor], task: Task) -> tuple[Tensor, Tensor]:
    """Return what the output layer sees of the support and the query set, ``[E, features]``."""
    transductive = model.config.transductive
    return model.learner.features_of_sets(params, task, transductive=transductive)


def curve(model: Model, index: int = 0) -> Any:
    """Draw a sinusoid before and after adapting; None where the task is none.

    Returns:
        The figure.
    """
    if model.ways is not None:
        return None
    drawn, ((axis,),) = style.figure(size=(5.5, 3.8))
    episodes = model.learner.open_tasks("test", evaluation=True)
    adapted_curve(axis, model.learner, episodes, model.meta_params, index)
    return drawn
