"""Build the network that a name means."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from datasets.theirs import passed
from maml.config import registry
from maml.errors import UserError
from maml.networks.calls import apply
from maml.networks.ordinary import check_parameters, explicit, switched


def build_network(
    name: str,
    *,
    image_shape: tuple[int, int, int] | None,
    ways: int,
    shape: tuple[int, ...] = (1,),
    integers: bool = False,
    one_for: str | None = "each output",
    taken: bool = True,
    **options: Any,
) -> nn.Module:
    """Return the network that ``--network name`` means, with weights from the global generator.

    Args:
        name: A network's name, or a user's own.
        image_shape: (C, H, W) of the data; None if the data is not images.
        ways: The number of outputs: a classifier's classes, or the numbers of a target.
        shape: The shape of an example.
        integers: Whether examples are integers; else they are floats.
        one_for: What each output of a user's own network is for, in words; None: any outputs.
        taken: Whether a user's own network must take examples. A user's own learner may call it
            on anything, as on (x, y).
        options: Fields of the configuration; fields that the network does not read are ignored.
    """
    known = registry.network(name)
    if known.takes is not None and (known.takes == "images") != (image_shape is not None):
        has = "none" if image_shape is None else "images"
        raise UserError(f"--network {name} takes {known.takes}, and the data set has {has}")
    if known.takes is not None and integers:
        raise UserError(
            f"--network {name} takes floats, and the examples of the data set are integers: give "
            "floats, or a network of your own, as one that begins with nn.Embedding"
        )
    read = {field: value for field, value in options.items() if field in (known.reads or ())}
    if known.takes == "points":
        if len(shape) != 1:
            raise UserError(f"--network {name} takes points, and an example is {list(shape)}")
        (read["inputs"],) = shape
    with registry.calling(network=known):
        make = known.maker()
        if not known.is_theirs:
            return explicit(make(image_shape, ways, **known.options, **read), name)
        network = _made(make, name, shape, ways)
        if not isinstance(network, nn.Module):
            raise UserError(f"--network {name}: returned {type(network).__name__}, no nn.Module")
        check_parameters(network, name)
        examples = torch.full((2, *shape), 1 if integers else 0.5)
        if any(isinstance(layer, LazyModuleMixin) for layer in network.modules()):
            # A first call makes the parameters; evaluation mode keeps no statistics.
            with torch.no_grad(), switched(network, training=False):
                network(torch.zeros_like(examples))
        network = explicit(network, name)
        _try(network, name, examples, ways, one_for, must=taken)
    return network


def _made(make: Any, name: str, shape: tuple[int, ...], count: int) -> Any:
    """Call a user's factory with the data's shape and the ways; refuse another signature."""
    names = ("image_shape", "ways") if len(shape) == 3 else ("shape", "outputs")
    signature = inspect.signature(make)
    given = (shape, count)[: passed(signature, 2)]
    called = ", ".join(f"{n}={value}" for n, value in zip(names, given, strict=False))
    called = f"it is called with {called}"
    try:
        signature.bind(*given)
    except TypeError:
        raise UserError(f"--network {name}: takes {signature}; {called}") from None
    try:
        return make(*given)
    except Exception as error:
        error.add_note(called)
        raise


def _try(
    network: nn.Module, name: str, examples: Tensor, count: int, one_for: str | None, *, must: bool
) -> None:
    """Call a user's network on ``examples [2, …]``, so that mistakes show at once."""
    try:
        with torch.no_grad():
            outputs, _ = apply(network, dict(network.named_parameters()), examples)
    except Exception:
        if must:
            raise
        return  # its learner calls it otherwise
    if not isinstance(outputs, torch.Tensor):
        raise UserError(
            f"--network {name}: forward returns {type(outputs).__name__}, no tensor; concatenate "
            "several outputs to one, which a learner of your own splits in loss(outputs, y)"
        )
    if one_for is not None and outputs.shape != (2, count):
        raise UserError(
            f"--network {name}: two {'images' if examples.dim() == 4 else 'examples'} became "
            f"{list(outputs.shape)}; outputs must be [2, {count}], one for {one_for} (others "
            "are for a learner of your own, which overrides loss(outputs, y))"
        )
