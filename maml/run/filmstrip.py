"""``filmstrip.png``: an episode of a test task, before and after adaptation."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from maml.learners.policy import Policy, first_return
from maml.params import Params
from maml.run.files import write_bytes
from maml.worker import Worker

FRAMES = 8
"""Pictures of an episode, at equal distances."""


def draw_filmstrip(run_dir: Path, worker: Worker, meta_params: Params) -> Path:
    """Draw the first query episode of a test task; return the picture's path.

    The task is the one of the first nine whose return after adaptation is the median. A row for the
    policy as it is, and one after ``--eval-inner-steps``, if that is more than none.
    Where an episode is over, its last picture stays, paler.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    learner = worker.learner
    assert isinstance(learner, Policy)
    tasks = worker.evaluation("test").tasks(torch.arange(9))
    params = {name: tensor.cpu() for name, tensor in meta_params.items()}
    adapts = bool(learner.problem(params, 1).start)
    strips = dict.fromkeys((0, learner.config.eval_inner_steps if adapts else 0))
    figure, axes = plt.subplots(
        len(strips), FRAMES, squeeze=False, figsize=(12, 1.3 * len(strips)), layout="constrained"
    )
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
    path = run_dir / "filmstrip.png"
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    plt.close(figure)
    write_bytes(path, picture.getvalue())
    return path
