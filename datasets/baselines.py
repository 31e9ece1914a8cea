"""What no learning at all achieves: the floor under every reported accuracy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from datasets import DataError, open_episodes
from datasets.episodes import Episodes
from datasets.registry import data_sets
from datasets.words import counted

_BATCH = 32


def nearest_neighbour_accuracy(episodes: Episodes, ids: Tensor, *, batch: int = _BATCH) -> Tensor:
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


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the other commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A parser of whole numbers in [least, most]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be in [{least}, {most}], not {value}")
        return value

    return parse


def _folder(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError('"": empty; was a shell variable not set?')
    return text


def main(arguments: list[str] | None = None) -> None:
    """Print the baseline of one task distribution: ``python -m datasets.baselines glyphs``.

    Exits with code 2 after one line for bad input, with 130 after Ctrl-C.
    """
    try:
        _main(arguments)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _main(arguments: list[str] | None) -> None:
    images = [name for name, known in data_sets().items() if known.episodes and known.image_shape]
    parser = _Parser(
        prog="python -m datasets.baselines",
        allow_abbrev=False,
        description="Accuracy of the nearest support image, which nothing has to learn.",
    )
    parser.add_argument("data", choices=images)
    parser.add_argument("--split", default="test")
    parser.add_argument("--ways", type=_whole(1), default=5)
    parser.add_argument("--shots", type=_whole(1), default=1)
    parser.add_argument("--queries", type=_whole(1), default=5)
    parser.add_argument("--tasks", type=_whole(1), default=600)
    parser.add_argument("--seed", type=_whole(0, 2**63 - 1), default=0)
    parser.add_argument("--data-root", type=_folder, default=None)
    options = vars(parser.parse_args(arguments))
    data, split, tasks = (options.pop(name) for name in ("data", "split", "tasks"))
    episodes = open_episodes(data, split, **options)
    accuracies = []
    with tqdm(total=tasks, unit="task", leave=False, mininterval=1) as bar:
        for first in range(0, tasks, _BATCH):
            ids = torch.arange(first, min(first + _BATCH, tasks))
            accuracies.append(nearest_neighbour_accuracy(episodes, ids))
            bar.update(len(ids))
    accuracy = torch.cat(accuracies)
    # One task has no deviation.
    ci95 = f"{100 * 1.96 * accuracy.std() / tasks**0.5:.2f}" if tasks > 1 else "?"
    print(
        f"{data} {split} {options['ways']}-way {options['shots']}-shot, pixel nearest neighbour: "
        f"{100 * accuracy.mean():.2f} ± {ci95} % over {counted(tasks, 'task')}"
    )


if __name__ == "__main__":
    main()
