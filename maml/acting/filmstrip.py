"""A film strip: an episode of a test task, before and after adaptation."""

from __future__ import annotations

from typing import Any

import torch

from datasets.episodes import Episodes
from maml.acting.policy import Policy, first_return
from maml.learners import Learner
from maml.params import Params
from maml.plots import style

FRAMES = 8
"""Pictures of an episode, at equal distances."""


def draw_filmstrip(learner: Learner, episodes: Episodes, meta_params: Params) -> Any:
    """Draw the first query episode of a test task, of ``episodes`` to evaluate on.

    The task is the one of the first nine whose return after adaptation is the median. A row for the
    policy as it is, and one after ``--eval-inner-steps``, if that is more than none.
    Where an episode is over, its last picture stays, paler.

    Returns:
        The figure.
    """
    assert isinstance(learner, Policy)
    tasks = episodes.tasks(torch.arange(9))
    params = {name: tensor.cpu() for name, tensor in meta_params.items()}
    adapts = bool(learner.problem(params, 1).start)
    strips = dict.fromkeys((0, learner.config.eval_inner_steps if adapts else 0))
    figure, axes = style.figure(len(strips), FRAMES, size=(1.5, 1.3))
    played = {steps: learner.materialise(params, tasks, steps).query for steps in strips}
    task = int(first_return(played[max(strips)]).median(dim=0).indices)
    first = tasks.query_x[task, 0, 0]
    longest = max(int(query.alive[task, 0].sum()) for query in played.values())
    for row, (steps, query) in zip(axes, played.items(), strict=True):
        seen = query.observations[task, 0]
        lasted = int(query.alive[task, 0].sum())
        total = float(query.rewards[task, 0].sum())
        row[0].set_ylabel(f"{steps} inner steps\nreturn {total:.3g}", fontsize=8)
        for axis, at in zip(row, torch.linspace(0, longest - 1, FRAMES).long(), strict=True):
            over = int(at) >= lasted
            learner.environment.picture(axis, first, seen[: min(int(at) + 1, lasted)])
            for line in axis.lines if over else ():
                line.set_alpha(0.25)
            axis.set_title(f"over at {lasted}" if over else f"step {int(at)}", fontsize=8)
            axis.set_xticks([])
            axis.set_yticks([])
    return figure
