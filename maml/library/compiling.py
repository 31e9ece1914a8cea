"""Call a meta-learner's compiled meta-gradient, with as little around it as possible."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from datasets.tasks import Task
from maml.execution.compiled import Compiled, Program, inductor, settings
from maml.learners import Learner
from maml.metagradient.differentiate import OuterGradient
from maml.metagradient.plan import Plan
from maml.params import Params

Asked = Literal["auto", True, False]


class Found(NamedTuple):
    """What a call finds: the mean loss, its gradient by ``parameters``, and each task's numbers."""

    loss: Tensor
    gradients: list[Tensor]
    losses: Tensor
    metrics: dict[str, Tensor]
    parameters: list[Tensor]


class _Means(NamedTuple):
    """The meta-gradient of a batch, and its means. The quick way needs nothing else."""

    sums: OuterGradient
    loss: Any
    gradients: list[Any]


def _with_means(function: Callable[..., OuterGradient]) -> Callable[..., _Means]:
    def both(params: Params, tasks: Any) -> _Means:
        sums = function(params, tasks)._replace(outputs=())
        n = len(sums.losses)
        return _Means(sums, sums.losses.sum() / n, [g / n for g in sums.gradients.values()])

    return both


class _Ready:
    """Compiled code, and the parameters that it is called with."""

    def __init__(self, program: Program, parameters: list[Tensor]) -> None:
        self.program, self._parameters = program, parameters
        self._kinds = [*map(_kind, parameters)]
        self._places: Any = program.places

    def __call__(self, tasks: Any) -> Found | None:
        parameters = self._parameters
        inputs = [*parameters, *(part.contiguous() for part in tasks)]
        if [*map(_kind, parameters)] != self._kinds or torch.is_inference_mode_enabled():
            return None
        with torch.no_grad():
            found = self.program.flat(inputs)
        if found is None:
            return None
        at = self._places
        gradients = [found[place] for place in at.gradients]
        metrics = {name: found[place] for name, place in at.sums.metrics.items()}
        return Found(found[at.loss], gradients, found[at.sums.losses], metrics, parameters)


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

    def may(self, learner: Learner, plan: Plan) -> bool:
        """Return whether meta-gradients of a batch may be compiled; say so if it was asked for."""
        if not self._asked:
            return False
        other = None
        if learner.config.inner_batch is not None:
            other = "the order of mini-batches is drawn"
        elif learner.any_ways:
            other = "the tasks may have any number of classes"
        elif self._asked == "auto" and any(p.device.type != "cpu" for p in learner.parameters()):
            other = "only asked for on a CPU"
        return plan.compiles(says=self._asked is True, other=other)

    def gradient(
        self,
        learner: Learner,
        params: Params,
        tasks: Task,
        plainly: Callable[..., OuterGradient],
        together: Callable[..., OuterGradient],
    ) -> OuterGradient:
        """Return the meta-gradient of a batch of tasks, by its code if there is any by now.

        ``plainly`` computes it, and ``together`` does so for all tasks at once, to be recorded.
        Both take the parameters and tasks.
        """
        if self._compiled is None:
            self._compiled = Compiled(
                inductor, reads=(learner.network, learner.criterion),
                apart=learner.network.parameters(), waits=self._asked is True, name="compile",
            )  # fmt: skip
        form, of = _form(learner, tasks), (learner.network.training, *settings())
        functions = _with_means(plainly), _with_means(together)
        found: _Means = self._compiled(functions[0], params, tasks, records=functions[1], of=of)
        program = self._compiled.program(of, params, tasks)
        every = [*learner.meta_parameters().values()]
        # Complex parameters are here as views.
        if program is not None and form is not None and all(p.is_leaf for p in every):
            self._ready.setdefault(form, _Ready(program, every))
        return found.sums

    def quickly(self, learner: Learner, tasks: Any) -> Found | None:
        """Return what compiled code finds of tasks; None if they need the long way."""
        ready = self._ready.get(_form(learner, tasks)) if self._ready else None
        if ready is None:
            return None
        if ready.program.reached.is_still_same():
            return ready(tasks)
        self._ready.clear()
        return None


def _kind(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.dtype, parameter.device, parameter.shape, parameter.requires_grad


def _form(learner: Learner, tasks: Any) -> Any:
    """Return what decides which code computes tasks; None if none is to be called quickly."""
    if not isinstance(tasks, tuple | list) or len(tasks) != 4:
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return None
    try:
        parts = [(part.shape, part.dtype, part.device, part.requires_grad) for part in tasks]
    except AttributeError:
        return None
    return (learner.network.training, *settings(), *parts)
