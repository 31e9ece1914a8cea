"""Inner rates of a user's own: numbers or parameters, for each step, for patterns of names."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from maml.errors import UserError
from maml.learners.adapting import named
from maml.networks.ordinary import own_name
from maml.params import Params

OWN = Tensor, list, tuple, Mapping
"""What is no number, and so `Rates`."""
PREFIX = "inner_rates."
"""The prefix of the names of rates that learn: the attribute of a learner."""


class Rates(nn.Module):
    """The inner rate of each parameter at each step. A `torch.nn.Parameter` learns.

    Rates for each step are a list, or a tensor ``[steps]``. At a later step, as in an evaluation
    with more steps, the last rate goes on.
    """

    def __init__(self, given: Any, steps: int, dtype: torch.dtype) -> None:
        """``given``: one rate, a list or tensor of one for each step, or ``{pattern: these}``.

        Raises:
            UserError: for another form, number of steps or dtype, or a rate that is not above 0.
        """
        super().__init__()
        by_pattern = given if isinstance(given, Mapping) else {"*": given}
        self._steps: dict[str, list[str]] = {}  # the names of a pattern's rates
        for pattern, value in by_pattern.items():
            values = value if isinstance(value, list | tuple) else [value]
            self._steps[pattern] = [self._add(each, steps, dtype) for each in values]
            if isinstance(value, list | tuple) and len(value) != steps:
                raise UserError(f"inner_lr: {len(value)} rates for inner_steps={steps}")

    def _add(self, rate: Any, steps: int, dtype: torch.dtype) -> str:
        """Register a rate, and return its name."""
        try:
            tensor = rate if isinstance(rate, Tensor) else torch.tensor(float(rate), dtype=dtype)
        except (TypeError, ValueError) as error:
            raise UserError(f"inner_lr is {rate!r}: give numbers, or parameters") from error
        if tensor.shape not in ((), (steps,)):
            raise UserError(f"inner_lr is {[*tensor.shape]}: give a rate [], or [{steps}] by step")
        if not all(0 < number < math.inf for number in tensor.reshape(-1).tolist()):
            raise UserError(f"inner_lr {rate!r}: must be above 0")
        name = f"rate{len(self._parameters) + len(self._buffers)}"
        if not (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
            self.register_buffer(name, tensor.detach().to(dtype, copy=True), persistent=False)
        elif tensor.dtype == dtype:
            self.register_parameter(name, tensor)
        else:
            raise UserError(f"inner_lr is {tensor.dtype}, and the module's parameters are {dtype}")
        return name

    def of_names(self, network: nn.Module, names: list[str]) -> dict[str, list[str]]:
        """Return the names of each parameter's rates, of the last pattern that matches it."""
        found = dict[str, list[str]]()
        for pattern, of_steps in self._steps.items():
            found |= dict.fromkeys(named(pattern, network, names, "inner_lr"), of_steps)
        for pattern, of_steps in self._steps.items():
            learns = any(name in self._parameters for name in of_steps)
            if (pattern != "*" or learns) and not any(each is of_steps for each in found.values()):
                raise UserError(
                    f"inner_lr: later patterns take all that {pattern} matches: put it after them"
                )
        if lacking := [name for name in names if name not in found]:
            name = own_name(network, lacking[0])
            raise UserError(f"inner_lr: it has no rate for {name}; give one for '*' first")
        return found

    def at(self, of_steps: list[str], step: int, meta_params: Params) -> Tensor:
        """Return a parameter's rate ``[]`` at a step, by what `of_names` returned for it."""
        name = of_steps[min(step, len(of_steps) - 1)]
        rate = meta_params.get(PREFIX + name, self._buffers.get(name))
        assert rate is not None
        return rate[min(step, len(rate) - 1)] if rate.dim() else rate
