"""``compile=True``: compiled gradients of a meta-learner, as long as their constants hold."""

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from maml.execution.compiled import DRAWS, Compiled, inductor
from maml.learners import Learner

_PLAIN = (bool, int, float, complex, str, type(None))
_DEPTH = 5
"""Levels of a loss that we search: ``method.__self__.schedule.temperature`` is at the third."""


class Compiling:
    """The compiled gradients of one meta-learner, for each mode and number of classes."""

    def __init__(self) -> None:
        self._of: dict[Any, tuple[Compiled, Any]] = {}
        self._given_up = False

    def __reduce__(self) -> Any:  # a copy compiles for itself
        return Compiling, ()

    def of(self, learner: Learner, loss: Any, *, training: bool) -> Compiled | None:
        """Return a caller of the compiled gradient; None: call the gradient without compiling.

        Kernels and random draws are not compiled. Compiled code takes the numbers in the network
        and the loss as constants. After one changes, a warning follows and compiled code is off.
        """
        device = next(iter(learner.meta_parameters().values())).device
        if self._given_up or learner.obstacle(device) is None:
            return None
        if learner.draws:
            self._give_up(DRAWS)
            return None
        held = {**_of_network(learner.network), **dict(_held("loss", loss, _DEPTH))}
        key = (training, learner.config.ways, learner.metric_names)
        if key not in self._of:
            self._of[key] = Compiled(inductor, name="compile"), held
        compiled, before = self._of[key]
        if held == before:
            return compiled
        changed = next(n for n in (held | before) if held.get(n) != before.get(n))
        self._give_up(f"{changed} has changed; computing without")
        return None

    def _give_up(self, why: str) -> None:
        self._given_up = True
        print(f"warning: compile: {why}", file=sys.stderr, flush=True)


def _of_network(network: nn.Module) -> dict[str, Any]:
    """Return a network's numbers, strings and identities of buffers, by name."""
    return {
        ".".join(filter(None, ("network", path, name))): value
        for path, module in network.named_modules()
        for name, value in (
            *((n, v) for n, v in vars(module).items() if isinstance(v, _PLAIN)),
            *((n, id(buffer)) for n, buffer in module._buffers.items()),
        )
    }


def _held(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield a loss's numbers, strings and identities of tensors by name, ``depth`` levels down."""
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, Tensor):
        yield name, id(value)
    elif depth and not isinstance(value, (type, types.ModuleType)):
        for inner, part in _parts(value):
            yield from _held(f"{name}.{inner}", part, depth - 1)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple, set, frozenset)):
        return enumerate(value)
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [*((name, cell.cell_contents) for name, cell in cells)]
    return [*getattr(value, "__dict__", {}).items()]
