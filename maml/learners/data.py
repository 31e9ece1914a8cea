"""What a learner asks of the data set, as the configuration says it."""

from __future__ import annotations

from typing import Any

import torch

from datasets import contents
from datasets.opening import Contents, list_classes
from maml.config import Config, registry


def data_options(config: Config) -> dict[str, Any]:
    """Return the values of the fields that are of the data set alone, as it is opened with."""
    return {name: getattr(config, name) for name in registry.data_set(config.data).reads or ()}


def data_contents(config: Config) -> Contents:
    """Return what a network has to know of the data set.

    Raises:
        DataError: naming the flag or the file.
    """
    ways, shots = training_task(config)
    return contents(
        config.data,
        config.data_root,
        ways=ways,
        shots=shots,
        queries=config.queries,
        seed=config.seed,
        dtype=getattr(torch, config.dtype),
        **data_options(config),
    )


def training_task(config: Config) -> tuple[int, int]:
    """Return the ways and shots of a training task: as at test, if the learner reads no others.

    Reptile's preset has ten shots while training. With another learner these are nobody's.
    """
    reads = registry.learner(config.learner).reads

    def of(name: str) -> int:
        own = f"train_{name}" if reads is None or f"train_{name}" in reads else name
        found: int = getattr(config, own) or getattr(config, name)
        return found

    return of("ways"), of("shots")


def class_names(config: Config) -> dict[str, list[str]] | None:
    """Return the names of each split's classes; None where they are known only with the images.

    Raises:
        DataError: if a split that the run reads has too few of them.
    """
    if registry.learner(config.learner).tasks != "episodes":
        return None
    ways = {"train": training_task(config)[0]}
    if config.eval_every:
        ways["validation"] = config.ways
    if config.test_tasks:
        ways["test"] = config.ways
    return list_classes(config.data, config.data_root, ways=ways, **data_options(config))
