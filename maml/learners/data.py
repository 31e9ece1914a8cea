"""Open what a learner needs of a configuration: data contents, network, tasks."""

from typing import Any

import torch
from torch import nn

from datasets import contents, open_episodes
from datasets.checked import Form
from datasets.components import is_theirs
from datasets.episodes import Episodes
from datasets.errors import DataError
from datasets.generators import drawn, kept
from datasets.opening import Contents
from maml.config import Config, registry
from maml.learners.objectives import Objective, classes_of, for_targets
from maml.networks import build_network
from maml.networks.calls import apply


def data_options(config: Config) -> dict[str, Any]:
    """Return what opens every split of the data: seed, folder, dtype, the fields that it reads."""
    own = registry.data_set(config.data).reads or ()
    return {
        "seed": config.seed,
        "data_root": config.data_root,
        "dtype": getattr(torch, config.dtype),
        **{name: getattr(config, name) for name in own},
    }


def data_contents(config: Config) -> Contents:
    """Return the data set facts that a network needs. A `DataError` names the flag or file."""
    ways, shots = training_task(config)
    return contents(
        config.data, ways=ways, shots=shots, queries=config.queries, **data_options(config)
    )


def training_task(config: Config) -> tuple[int, int]:
    """Return the ways and shots of a training task: the test's, unless the learner reads others.

    Reptile's preset has ten training shots. A learner that does not read them ignores them.
    """
    ways, shots = config.ways, config.shots
    if registry.is_read("train_ways", config):
        ways = config.train_ways or ways
    if registry.is_read("train_shots", config):
        shots = config.train_shots or shots
    return ways, shots


def network_of(config: Config, contents: Contents, classes: int, *, any_outputs: bool) -> nn.Module:
    """Return the network that a configuration names. The seed draws its initial weights.

    A classifier has ``classes`` outputs. A user's network may have any number if ``any_outputs``.
    """
    outputs = classes if contents.classifies else contents.point[1]
    one_for = "each class" if contents.classifies else "each number of an answer"
    own = registry.network(config.network).reads or ()
    with drawn(config.seed, "initial weights"):
        return build_network(
            config.network,
            image_shape=contents.image_shape,
            ways=outputs,
            shape=contents.shape,
            integers=contents.integers,
            one_for=None if any_outputs else one_for,
            taken=not is_theirs(config.learner),
            **{name: getattr(config, name) for name in own},
        )


def own_objective(objective: Objective, contents: Contents, network: nn.Module) -> Objective:
    """Return an objective for a user's own loss, whose integer targets may be no classes."""
    if contents.form is None or not contents.classifies:
        return objective
    x = torch.full((2, *contents.shape), 1 if contents.integers else 0.5)
    y = torch.zeros(2, *contents.form["query_y"][1])
    try:
        with torch.no_grad(), kept():
            outputs, _ = apply(network, dict(network.named_parameters()), x)
    except Exception:
        return objective  # the learner calls the network otherwise
    return for_targets(objective, classes_of(outputs, y, default=False), y.dim() - 1)


def few_shot_tasks(
    config: Config, split: str, form: Form | None, *, evaluation: bool, classes: bool
) -> Episodes:
    """Return the few-shot tasks of ``split``, to learn from or for an ``evaluation``.

    A user's tasks must have the ``form`` of the first task; with ``classes``, labels 0 to ways − 1.
    """
    ways, shots = (config.ways, config.shots) if evaluation else training_task(config)
    try:
        return open_episodes(
            config.data,
            split,
            ways=ways,
            shots=shots,
            queries=config.eval_queries if evaluation else config.queries,
            form=form,
            classes=ways if classes else None,
            **data_options(config),
        )
    except DataError as error:
        # The sampler cannot tell which flag gave it a number, so its message may name another flag.
        said = str(error)
        if evaluation:
            said = said.replace("--queries", "--eval-queries")
        else:
            for name, value in {"ways": ways, "shots": shots}.items():
                if value == getattr(config, f"train_{name}"):
                    said = said.replace(f"--{name} ", f"--train-{name} ")
        raise DataError(said) from error
