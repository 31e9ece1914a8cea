"""Draw one task: its images and the learner's answers."""

from typing import Any

import torch
from torch import Tensor

from datasets.tasks import Task
from datasets.words import counted
from maml.config import registry
from maml.evaluation.scores import answers
from maml.learners import Learner
from maml.library.model import Model
from maml.metagradient import by_task
from maml.plots import style
from maml.plots.style import BLUE, RED
from maml.worker import Worker

LONGEST = 12
"""Number of characters of a class's name that fit."""
SHOWN = 6
"""Show at most this many queries, and this many support examples, per class."""


def task_of(model: Model, index: int) -> tuple[Task, list[str]]:
    """Return a test task ``[1, …]`` of a run, and its classes' names or "class 1", "class 2", …."""
    episodes = model.episodes("test").episodes
    ids = torch.tensor([index])
    task, known = next(by_task.one_by_one(episodes.tasks(ids))), episodes.names(ids)
    if known is None:
        return task, [f"class {c + 1}" for c in range(model.ways or 0)]
    # Show only the last part of a path, and only the beginning of a long name.
    short = [name.rpartition("/")[2] for name in known[0]]
    return task, [n if len(n) <= LONGEST else f"{n[: LONGEST - 1]}…" for n in short]


def panel(model: Model, index: int = 0) -> Any:
    """Draw a test task: each row shows a class's support images, then its queries and answers.

    A right answer has a blue frame and a tick. A wrong answer has a red frame, a cross and the
    answered class. Return None for regression, if the examples are not images, or if the learner
    has other outputs than one for each class.
    """
    if model.ways is None or model.image_shape is None:
        return None
    task, classes = task_of(model, index)
    config, truth = model.config, task.query_y[0]
    worker = Worker(config, model.device, trains=False)

    def answered(own: Learner, task: Task) -> Tensor:
        return answers(own, model.meta_params, task, config.eval_inner_steps)

    (outputs,) = worker.evaluated("test", torch.tensor([index]), answered)
    if truth.dim() != 1 or outputs.shape[1:] != (len(truth), model.ways):
        return None
    chosen = outputs[0].argmax(-1).cpu()
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
            axis, answer = axes[c, left + 1 + i], int(chosen[query])
            _show(axis, task.query_x[0, query])
            axis.set_axis_on()
            axis.set(xticks=[], yticks=[])
            for side in axis.spines.values():
                side.set(color=BLUE if answer == c else RED, linewidth=3)
            said = "✓" if answer == c else f"✗ {classes[answer].removeprefix('class ')}"
            axis.set_title(said, fontsize=8, color=BLUE if answer == c else RED, pad=3)
    accuracy = float((chosen == truth).float().mean())
    way = "transductive" if config.transductive else "non-transductive"
    adapts = registry.learner(config.learner).adapts_at_test
    after = f" after {counted(config.eval_inner_steps, 'inner step')}" if adapts else ""
    drawn.suptitle(
        f"test task {index}: support left, queries right; {100 * accuracy:.0f} % of {len(truth)} "
        f"queries right{after} ({way})"
    )
    return drawn


def _show(axis: Any, image: Tensor) -> None:
    pixels = image.float().clamp(0, 1).permute(1, 2, 0)
    axis.imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
