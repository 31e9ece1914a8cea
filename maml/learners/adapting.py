"""Select what the inner loop adapts: patterns over the names of a network's parameters.

``PATTERN[=RATE],…``: a pattern is a parameter name, in which ``*`` stands for any characters. Names
are the network author's; a pattern that fits none of them may use the run's names (``module.…``).
``@head`` is the output layer, ``@body`` is all but the output layer, and ``@norm`` is the scales
and shifts of the batch norms, if any. A parameter adapts at ``--inner-lr`` times the rate of the
last pattern that matches it (rate 1 by default). A parameter with rate 0, or without a matching
pattern, stands still. So ``*`` is MAML, ``@head`` ANIL, ``@body`` BOIL, ``*.lora_*`` a low-rank
subset, ``*,@head=10`` MAML with a faster head.
"""

import fnmatch
import math
from collections.abc import Iterable

import torch
from torch import nn

from maml.errors import UserError
from maml.networks.headless import head_prefix, in_short
from maml.networks.ordinary import norm_parameters, own_name
from maml.params import Params


def adapting(pattern: str, network: nn.Module, names: Iterable[str], why: str) -> dict[str, float]:
    """Return ``{name: rate}`` of the parameters that adapt, in the order of ``names``.

    ``why`` names the pattern's source in messages: ``--adapt …``. Raise `UserError` for an invalid
    rate, for a pattern (not ``@norm``) that matches no name, and if nothing adapts.
    """
    names = list(names)
    rates = dict.fromkeys(names, 0.0)
    for part in pattern.split(","):
        which, equals, number = part.strip().partition("=")
        rate = _rate(number, why) if equals else 1.0
        rates.update(dict.fromkeys(named(which, network, names, why), rate))
    moving = {name: rate for name, rate in rates.items() if rate}
    if not moving:
        raise UserError(f"{why}: no parameter adapts; use --inner-steps 0 for that")
    return moving


def frozen(pattern: str | None, network: nn.Module, why: str) -> list[str]:
    """Return the names of the network's parameters that neither adapt nor learn, in order.

    The author froze some by ``requires_grad_(False)``, and ``--freeze`` names others. Now all
    require gradients again: a problem states what is differentiated, and this list what is frozen.
    """
    parameters = dict(network.named_parameters())
    still = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    network.requires_grad_(True)
    for part in pattern.split(",") if pattern is not None else ():
        still.update(named(part.strip(), network, list(parameters), why))
    return [name for name in parameters if name in still]


def named(which: str, network: nn.Module, names: list[str], why: str) -> list[str]:
    """Return the ``names`` that one pattern matches."""
    own = {name: own_name(network, name) for name in names}
    tied: dict[str, str] = getattr(network, "tied", {})
    every = dict(zip(names, names, strict=True)) | tied  # any name of a parameter, to the one here
    if which == "@norm":
        return [name for name in names if name in norm_parameters(network)]
    if which in ("@head", "@body"):
        prefix = head_prefix(network, f"{why}: the network")
        # A parameter is the head's if any of its names is.
        of_head = {name for any_name, name in every.items() if any_name.startswith(prefix)}
        found = [name for name in names if (name in of_head) == (which == "@head")]
    else:
        of_author = {own_name(network, any_name): name for any_name, name in every.items()}
        for known in (of_author, every):
            matched = {known[name] for name in fnmatch.filter(known, which)}
            found = [name for name in names if name in matched]
            if found:
                break
    if not found:
        there = in_short([*own.values()])
        raise UserError(f"{why}: {which!r} names none of the network's parameters: {there}")
    return found


def _rate(text: str, why: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    # The limit is float32's for every --dtype, so that all dtypes accept the same rates.
    if not 0 <= rate <= torch.finfo(torch.float32).max:
        raise UserError(f"{why}: the rate {text!r} must be a number of at least 0")
    return rate


def tree(params: Params) -> nn.Module:
    """Return a module whose parameters have these dotted names. Nothing calls the module."""
    root = nn.Module()
    for name, tensor in params.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor.detach().clone()))
    return root
