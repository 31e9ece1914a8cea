"""What no learning at all achieves: the floor under every reported accuracy."""

from __future__ import annotations

import torch
from torch import Tensor

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
