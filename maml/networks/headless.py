"""Separate a network's features from its output layer."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor, nn

from maml.errors import UserError
from maml.networks.calls import alone_with
from maml.networks.ordinary import own_name, tensors, untie

T = TypeVar("T")


def head_prefix(network: nn.Module, who: str, or_else: str = "") -> str:
    """Return the prefix of the output layer's parameters. Errors call the network ``who``."""
    prefix = getattr(network, "head_prefix", None)
    if not isinstance(prefix, str):
        raise UserError(
            f"{who} does not say which its output layer is: give its class "
            f'head_prefix = "name of the layer."{or_else}'
        )
    if not own_name(network, prefix):
        raise UserError(f"{who} says head_prefix = '': its outputs are features alone")
    names = list(tensors(network))
    if not any(name.startswith(prefix) for name in names):
        own = [own_name(network, name) for name in names]
        raise UserError(
            f"{who} says head_prefix = {own_name(network, prefix)!r}, and no name of a parameter "
            f"begins so: {in_short(own)}"
        )
    return prefix


def in_short(given: Iterable[str]) -> str:
    """Join names for a message; of more than six, only the first four and the last two."""
    names = list(given)
    return ", ".join(names if len(names) <= 6 else [*names[:4], "…", *names[-2:]])


def given_to_head(network: nn.Module, name: str, call: Callable[[], T]) -> tuple[Tensor, T]:
    """Return the output layer's input in ``call()``, ``[E, F]``, and the result of ``call()``."""
    layer = head_prefix(network, f"the network {name}").rstrip(".")
    head, _ = layer_of(network, layer)
    if head is None:
        its = own_name(network, layer)
        raise UserError(f"the network {name}: its output layer {its} is no layer of it")
    seen: list[Tensor] = []

    def look(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        seen.append((*given, *named.values())[0].flatten(1))

    with alone_with(network):
        hook = head.register_forward_pre_hook(look, with_kwargs=True)
        try:
            result = call()
        finally:
            hook.remove()
    if len(seen) != 1:
        times = "does not call" if not seen else f"calls {len(seen)} times"
        raise UserError(
            f"the network {name} {times} its output layer, {own_name(network, layer)}: features "
            "are what it is given in one call"
        )
    return seen[0], result


def without_head(network: nn.Module, name: str, or_else: str = "") -> tuple[nn.Module, int]:
    """Return ``network`` with features in place of outputs, and how many features there are.

    Its output layer, which must be linear, becomes the identity, in place. Parameters that this
    layer shares with others stay parameters of the others.
    """
    layer = head_prefix(network, f"--network {name}", or_else).rstrip(".")
    head, _ = layer_of(network, layer)
    if not isinstance(head, nn.Linear):
        its = own_name(network, layer)
        raise UserError(f"--network {name}: its output layer {its} is not linear")
    parameters = dict(network.named_parameters())
    for other, first in getattr(network, "tied", {}).items():
        path, _, attribute = other.rpartition(".")
        setattr(network.get_submodule(path), attribute, parameters[first])
    network.set_submodule(layer, nn.Identity())
    network.tied = untie(network)  # type: ignore[assignment]
    return network, head.in_features


def layer_of(network: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    """Return the layer of this name, or None; and its first name, if it is in several places. Its
    tensors have the first name.
    """
    layers = dict(network.named_modules(remove_duplicate=False))
    layer = layers.get(name)
    return layer, next((first for first, other in layers.items() if other is layer), name)
