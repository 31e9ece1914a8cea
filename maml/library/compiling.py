"""Call a meta-learner's compiled meta-gradient, with as little around it as possible."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from datasets.tasks import Task
from maml.execution.compiled import Compiled, Program, inductor
from maml.execution.outside import Reached
from maml.learners import Learner
from maml.params import Params

Asked = Literal["auto", True, False]


class Found(NamedTuple):
    """Losses ``[B]``, and the gradients of their sum by ``parameters``, in this order."""

    losses: Tensor
    gradients: list[Tensor]
    metrics: dict[str, Tensor]
    parameters: list[Tensor]


class _Ready(NamedTuple):
    program: Program
    parameters: list[Tensor]
    kinds: list[Any]

    def __call__(self, tasks: Any) -> Found | None:
        inputs = [*self.parameters, *(part.contiguous() for part in tasks)]
        if not self.program.takes(inputs) or _kinds(self.parameters) != self.kinds:
            return None
        found = self.program(inputs)
        return Found(found.losses, [*found.gradients.values()], found.metrics, self.parameters)


class Compiling:
    """The compiled meta-gradients of a meta-learner. A copy of the meta-learner compiles anew."""

    def __init__(self, asked: Asked) -> None:
        """``asked``: as ``compile`` of a meta-learner."""
        self._asked = asked
        self._compiled: Compiled | None = None
        self._ready: dict[Any, _Ready] = {}

    def __deepcopy__(self, memo: Any) -> Self:
        return type(self)(self._asked)

    def __reduce__(self) -> Any:
        return type(self), (self._asked,)

    def caller(self, learner: Learner, params: Params) -> Callable[..., Any] | None:
        """Return what calls a function of parameters and tasks that are batched; None: nobody."""
        device = next(iter(params.values())).device
        if not self._asked or (self._asked == "auto" and device.type != "cpu"):
            return None
        if learner.config.inner_batch is not None:  # the order of mini-batches is drawn
            return None
        if self._compiled is None:

            def reads(apart: Iterable[Tensor]) -> Reached:
                without = (*learner.network.parameters(), *apart)
                return Reached(learner.network, learner.criterion, without=without)

            self._compiled = Compiled(
                inductor, reads=reads, waits=self._asked is True, name="compile"
            )
        return self._compiled

    def remember(self, owner: nn.Module, learner: Learner, tasks: Any, params: Params) -> None:
        """Let `quickly` compute further tasks of the form of ``tasks``, if there is code for it."""
        form = _form(owner, tasks)
        if self._compiled is None or form is None or form in self._ready:
            return
        program = self._compiled.program(learner.metric_names, params, Task(*tasks))
        if program is not None:
            every = [*learner.meta_parameters().values()]
            self._ready[form] = _Ready(program, every, _kinds(every))

    def quickly(self, owner: nn.Module, tasks: Any) -> Found | None:
        """Return what compiled code finds of tasks; None if they need the long way."""
        if not self._ready or (form := _form(owner, tasks)) not in self._ready:
            return None
        ready = self._ready[form]
        if not ready.program.reached.is_still_same():
            del self._ready[form]
            return None
        return ready(tasks)


def _kinds(parameters: list[Tensor]) -> list[Any]:
    return [(p.dtype, p.device, p.shape, p.requires_grad) for p in parameters]


def _form(owner: nn.Module, tasks: Any) -> Any:
    """Return what decides which code computes tasks; None if none does."""
    if not isinstance(tasks, tuple | list) or len(tasks) != 4:
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return None
    try:
        parts = [(part.shape, part.dtype, part.device, part.requires_grad) for part in tasks]
    except AttributeError:
        return None
    return (owner.training, torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), *parts)
