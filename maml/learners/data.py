"""What a learner asks of the data set, as the configuration says it."""

from __future__ import annotations

from typing import Any

import torch

from datasets import contents
from datasets.opening import Contents
from maml.config import Config, registry


def data_options(config: Config) -> dict[str, Any]:
    """Return the values of the fields that are of the data set alone, as it is opened with."""
    return {name: getattr(config, name) for name in registry.data_set(config.data).reads or ()}


def data_contents(config: Config) -> Contents:
    """Return what a network has to know of the data set.

    Raises:
        DataError: naming the flag or the file.
    """
    return contents(
        config.data,
        config.data_root,
        ways=config.ways,
        shots=config.shots,
        queries=config.queries,
        seed=config.seed,
        dtype=getattr(torch, config.dtype),
        **data_options(config),
    )
