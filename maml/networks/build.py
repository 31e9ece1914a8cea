"""Which network a name means."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from maml.config import Config, registry
from maml.errors import UserError
from maml.networks.ordinary import explicit


def network_options(config: Config) -> dict[str, Any]:
    """Return the values of the fields that are of the network alone."""
    return {name: getattr(config, name) for name in registry.network(config.network).reads or ()}


def build_network(
    name: str,
    *,
    image_shape: tuple[int, int, int] | None,
    ways: int,
    point: tuple[int, int] = (1, 1),
    **options: Any,
) -> nn.Module:
    """Return the network that ``--network name`` means, with weights from the global generator.

    Args:
        name: A network's name, or ``module:attribute``: a user's own ``(image_shape, ways) →
            nn.Module``, be it an ordinary module or one with explicit statistics.
        image_shape: (C, H, W) of the data; None where it is not images.
        ways: Outputs of a classifier.
        point: What data has that is not images: numbers of an example, and of an answer to it.
        options: Fields of the configuration; those that the network does not read are left out.

    Raises:
        UserError: if the network does not take such data, or a user's own is no network.
        DataError: if a user's own ends in an exception.
    """
    known = registry.network(name)
    if known.takes is not None and (known.takes == "images") != (image_shape is not None):
        raise UserError(
            f"--network {name} takes {known.takes}, and the data set has "
            f"{'none' if image_shape is None else 'images'}"
        )
    read = {field: value for field, value in options.items() if field in (known.reads or ())}
    if known.takes == "points":
        read |= dict(zip(("inputs", "outputs"), point, strict=True))
    with registry.calling("network", known):
        network = known.load()(image_shape, ways, **known.options, **read)
        if not known.is_theirs:
            assert isinstance(network, nn.Module)
            return network
        if not isinstance(network, nn.Module):
            raise UserError(f"--network {name}: returned {type(network).__name__}, no nn.Module")
        _check_parameters(network, name)
        network = explicit(network, name)
        _try(network, name, image_shape, ways)
    return network


def _check_parameters(network: nn.Module, name: str) -> None:
    """Refuse what would be trained otherwise than its author thinks."""
    seen: dict[int, str] = {}
    for path, module in network.named_modules():
        for attribute, parameter in module._parameters.items():
            where = f"{path}.{attribute}" if path else attribute
            if parameter is None:
                continue
            if not parameter.requires_grad:
                raise UserError(
                    f"--network {name}: {where} does not require a gradient, but all parameters of "
                    "a network are learned; make it a buffer, or let a learner of your own state "
                    "what adapts (docs/extending.md)"
                )
            if seen.setdefault(id(parameter), where) != where:
                raise UserError(
                    f"--network {name}: {where} and {seen[id(parameter)]} are one parameter; share "
                    "the layer, not its weight"
                )


def _try(
    network: nn.Module, name: str, image_shape: tuple[int, int, int] | None, ways: int
) -> None:
    """Call a user's network once: it makes lazy layers' weights, and shows mistakes at once."""
    x = torch.zeros(2, *(image_shape or (1,)))
    with torch.no_grad():
        outputs, _ = network(x)
    if image_shape is not None and outputs.shape != (2, ways):
        raise UserError(
            f"--network {name}: two images became {list(outputs.shape)}; outputs must be "
            f"[2, {ways}], one number for each of --ways {ways}"
        )
