"""What no learning at all achieves: the floor under every reported accuracy."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from datasets import OPENERS, DataError, open_episodes
from datasets.episodes import Episodes


def nearest_neighbour_accuracy(episodes: Episodes, ids: Tensor, *, batch: int = 32) -> Tensor:
    """Query accuracy of the nearest support image in pixel space (L2), per task.

    ``ids`` is int64 ``[T]``; the result is float64 ``[T]`` in [0, 1]. Ties go to the first of the
    support images. This is the "pixels, no fine-tuning" baseline of Vinyals et al. 2016
    (arXiv:1606.04080, table 1), with L2 for cosine.
    """
    accuracies = []
    for some in ids.split(batch):
        task = episodes.tasks(some)
        # The exact differences: cdist's shortcut through a matrix product rounds near-ties either
        # way.
        distance = torch.cdist(
            task.query_x.flatten(2).double(),
            task.support_x.flatten(2).double(),
            compute_mode="donot_use_mm_for_euclid_dist",
        )
        nearest = task.support_y.gather(1, distance.argmin(dim=2))
        accuracies.append((nearest == task.query_y).double().mean(dim=1))
    return torch.cat(accuracies) if accuracies else torch.empty(0, dtype=torch.float64)


def main(arguments: list[str] | None = None) -> None:
    """Print the baseline of one task distribution: ``python -m datasets.baselines glyphs``."""
    parser = argparse.ArgumentParser(
        prog="python -m datasets.baselines",
        description="Accuracy of the nearest support image, which nothing has to learn.",
    )
    parser.add_argument("data", choices=[name for name in OPENERS if name != "sinusoid"])
    parser.add_argument("--split", default="test")
    parser.add_argument("--ways", type=int, default=5)
    parser.add_argument("--shots", type=int, default=1)
    parser.add_argument("--queries", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-root", default=None)
    options = vars(parser.parse_args(arguments))
    data, split, tasks = (options.pop(name) for name in ("data", "split", "tasks"))
    try:
        episodes = open_episodes(data, split, **options)
    except DataError as error:
        parser.exit(2, f"error: {error}\n")
    accuracy = nearest_neighbour_accuracy(episodes, torch.arange(tasks))
    ci95 = 1.96 * accuracy.std() / tasks**0.5
    print(
        f"{data} {split} {options['ways']}-way {options['shots']}-shot, pixel nearest neighbour: "
        f"{100 * accuracy.mean():.2f} ± {100 * ci95:.2f} % over {tasks} tasks"
    )


if __name__ == "__main__":
    main()
