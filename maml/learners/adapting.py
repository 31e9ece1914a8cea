"""What the inner loop adapts, and what stays: patterns over the names of a network's parameters.

``PATTERN[=RATE],…``: a pattern is a name in which ``*`` stands for any characters, as the network's
author has it (one that fits none of these names may be as a run has it, ``module.…``), or ``@head``
(the network's output layer), ``@body`` (all but that) or ``@norm`` (the scales and shifts of its
batch norms, of which it may have none). A parameter adapts at ``--inner-lr`` times
the rate of the last pattern that has it; without a rate that is 1. One with the rate 0, or that no
pattern has, stands still. So ``*`` is MAML, ``@head`` ANIL, ``@body`` BOIL, ``*.lora_*`` a low-rank
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
    """Return the rates of what adapts, by name, in the order of ``names``.

    ``why`` is what asks for the pattern, for messages: ``--adapt …``. What is no rate, a pattern
    that no name has, and nothing that adapts are refused.
    """
    names = list(names)
    rates = dict.fromkeys(names, 0.0)
    for part in pattern.split(","):
        which, equals, number = part.strip().partition("=")
        rate = _rate(number, why) if equals else 1.0
        rates.update(dict.fromkeys(_named(which, network, names, why), rate))
    moving = {name: rate for name, rate in rates.items() if rate}
    if not moving:
        raise UserError(f"{why}: nothing adapts; --inner-steps 0 says so better")
    return moving


def frozen(pattern: str | None, network: nn.Module, why: str) -> list[str]:
    """Return the names of the network's parameters that neither adapt nor learn, in order.

    Its author has frozen some, by ``requires_grad_(False)``, and ``--freeze`` others. From here on
    all require a gradient again: a problem says what is differentiated, and this list what learns.
    """
    parameters = dict(network.named_parameters())
    still = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    network.requires_grad_(True)
    for part in pattern.split(",") if pattern is not None else ():
        still.update(_named(part.strip(), network, list(parameters), why))
    return [name for name in parameters if name in still]


def _named(which: str, network: nn.Module, names: list[str], why: str) -> list[str]:
    """Return those of ``names`` that one pattern has."""
    own = {name: own_name(network, name) for name in names}
    if which == "@norm":
        return [name for name in names if name in norm_parameters(network)]
    if which in ("@head", "@body"):
        prefix = head_prefix(network, f"{why}: the network")
        found = [name for name in names if name.startswith(prefix) == (which == "@head")]
    else:
        found = [name for name in names if fnmatch.fnmatchcase(own[name], which)]
        found = found or [name for name in names if fnmatch.fnmatchcase(name, which)]
    if not found:
        there = in_short([*own.values()])
        raise UserError(f"{why}: {which!r} names none of the network's parameters: {there}")
    return found


def _rate(text: str, why: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    # Whatever --dtype is: what is a rate in one is a rate in the other.
    if not 0 <= rate <= torch.finfo(torch.float32).max:
        raise UserError(f"{why}: the rate {text!r} is no number of at least 0")
    return rate


def tree(params: Params) -> nn.Module:
    """Return a module, never called, whose parameters have these names, dots and all."""
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
