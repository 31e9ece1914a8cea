"""``compile=True``: compiled gradients of a meta-learner, while what they were made of stays."""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from maml.execution.compiled import DRAWS, Compiled, inductor
from maml.learners import Learner

_PLAIN = (bool, int, float, complex, str, type(None))


class Compiling:
    """The compiled gradients of one meta-learner: of each mode and number of classes."""

    def __init__(self) -> None:
        self._of: dict[Any, tuple[Compiled, Any]] = {}
        self._given_up = self._told = False

    def __reduce__(self) -> Any:  # a copy compiles for itself
        return Compiling, ()

    def of(self, learner: Learner, loss: Any, *, training: bool) -> Compiled | None:
        """Return what calls the gradient, or None where it is to be called as it is.

        Kernels and random draws are not compiled. A number that the network or the loss holds is a
        constant of compiled code: once one has changed, nothing is compiled, as a line says.
        """
        if learner.draws and not self._told:
            self._told = True
            print(f"warning: compile: {DRAWS}", file=sys.stderr)
        device = next(iter(learner.meta_parameters().values())).device
        if self._given_up or learner.draws or not learner.in_torch(device):
            return None
        held = tuple(_held(learner.network, loss))
        key = (training, learner.config.ways, learner.metric_names)
        made = (Compiled(inductor, name="compile"), held)
        compiled, before = self._of.setdefault(key, made)
        if held == before:
            return compiled
        self._given_up = True
        changed = next((name for name, *_ in set(held) ^ set(before)), "")
        line = f"warning: compile: {changed} of the network or the loss has changed"
        print(f"{line}; computing without", file=sys.stderr)
        return None


def _held(network: nn.Module, loss: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the numbers and texts that a network and a loss hold, and which buffers they have."""
    holders = [*network.modules(), *(loss.modules() if isinstance(loss, nn.Module) else [loss])]
    for place, holder in enumerate(holders):
        values = dict(getattr(holder, "__dict__", {}))
        for name, value in (*values.items(), *_captured(holder)):
            if isinstance(value, _PLAIN):
                yield name, place, value
        for name, buffer in values.get("_buffers", {}).items():
            yield name, place, id(buffer)


def _captured(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function of one's own takes from around it: the values of its closure."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        yield name, cell.cell_contents
