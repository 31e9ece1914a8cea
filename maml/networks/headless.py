"""A network's features and its output layer, apart."""

from __future__ import annotations

from torch import nn

from maml.errors import UserError


def without_head(network: nn.Module, name: str) -> tuple[nn.Module, int]:
    """Return ``network`` with features in place of outputs, and how many features there are.

    Its output layer, which its ``head_prefix`` names, becomes the identity; the network is changed
    in place. ``name`` is what ``--network`` was given.

    Raises:
        UserError: if the network does not say which its output layer is, or that is not linear.
    """
    prefix = getattr(network, "head_prefix", None)
    if not isinstance(prefix, str):
        raise UserError(
            f"--network {name} does not say which its output layer is: give its class "
            'head_prefix = "name of the layer."'
        )
    path, _, attribute = prefix.rstrip(".").rpartition(".")
    parent = network.get_submodule(path)
    head = parent._modules.get(attribute)
    if not isinstance(head, nn.Linear):
        raise UserError(f"--network {name}: its output layer {prefix.rstrip('.')} is not linear")
    parent._modules[attribute] = nn.Identity()
    return network, head.in_features
