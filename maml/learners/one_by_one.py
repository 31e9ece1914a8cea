"""A learner's computations of B tasks, one task after the other in each of some threads.

So it is where ``torch.func.vmap`` cannot batch tasks, or where one task is work enough
(``--batching``). What a network draws has the address of the task.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from maml.execution.threads import spread
from maml.learners.base import Learner
from maml.metagradient import draws
from maml.metagradient.by_task import one_by_one
from maml.metagradient.differentiate import OuterGradient
from maml.networks.calls import alone_with
from maml.params import Params
from maml.seeds import kept

T = TypeVar("T")
HEAVY = 500_000
"""Multiplications and additions of one operation, from which on tasks are computed one by one.

With less, what an operation costs beside its work counts: ``torch.func.vmap`` pays it once for all
tasks. With more, one task fills a core, and for all together results leave the cache. Two cores
break even between 70,000 and 1,000,000; `benchmarks.throughput --settings own-…` compares both.
"""
_ALONE = threading.RLock()
"""The global generators are one for all threads: one call at a time draws from them."""


def addresses(learner: Learner, split: str, ids: Tensor) -> list[draws.Address]:
    """Return where the draws of tasks of the ids ``[B]`` come from."""
    return [draws.Address(learner.config.seed, split, id) for id in ids.tolist()]


def outer_gradient(
    learner: Learner,
    meta_params: Params,
    tasks: Any,
    where: Sequence[draws.Address],
    phase: int,
    call: Callable[..., OuterGradient] | None = None,
) -> OuterGradient:
    """Return what `Learner.outer_gradient` does; `Learner.draws` becomes true if the tasks draw.

    ``tasks`` may be a list, each a batch of one, of any sizes: then there are no outputs. ``where``
    is as in `each`. ``call`` calls a function of the meta-parameters and a task, in its own way
    (``--compile``).
    """

    def one(own: Learner, task: Any) -> OuterGradient:
        gradient = functools.partial(own.outer_gradient, phase=phase, checked=True)
        if call is None or learner.draws:
            return gradient(meta_params, task)
        return call(gradient, meta_params, task)

    learner.checked_way(meta_params, tasks, phase)
    sums: Params = {}
    found = []
    with _ALONE if learner.draws else contextlib.nullcontext(), kept():
        before = draws.state()
        for of_task in each(learner, one, tasks, where):
            own = of_task.gradients
            sums = {n: sums[n] + g for n, g in own.items()} if sums else own
            found.append(of_task)
        drawn = draws.state() != before
    if not learner.draws and drawn:
        # Somebody has drawn: it may have been the network.
        learner.draws = True
        return outer_gradient(learner, meta_params, tasks, where, phase, call)
    losses = torch.cat([of.losses for of in found])
    outputs = None
    if not isinstance(tasks, list):
        outputs = pytree.tree_map(lambda *each: torch.cat(each), *(of.outputs for of in found))
    return OuterGradient(
        sums,
        losses,
        outputs,
        {name: torch.cat([of.metrics[name] for of in found]) for name in learner.metric_names},
    )


def each(
    learner: Learner,
    function: Callable[[Learner, Any], T],
    tasks: Any,
    where: Sequence[draws.Address] | None = None,
) -> Iterator[T]:
    """Yield ``function(learner or a copy, task)`` of each task, a batch of one, in order.

    ``where`` is where the draws of each come from, if there are any.
    """
    items = list(one_by_one(tasks))
    if where is None or not learner.draws:
        where = [draws.NONE] * len(items)
    placed = list(zip(items, where, strict=True))

    def one(own: Learner, item: tuple[Any, draws.Address]) -> T:
        with draws.of_task(item[1]):
            return function(own, item[0])

    if not learner.draws:
        yield from spread(learner, one, placed, copying=alone_with(learner.network))
        return
    # A checkpointed block draws once more on the way back.
    with _ALONE, kept():
        yield from spread(learner, one, placed, alone=True)


def is_heavy(learner: Learner, meta_params: Params, tasks: Any) -> bool:
    """Say whether an operation on one task is work enough for a core."""
    with kept(), draws.of_task(draws.NONE), _Work() as work:
        for task in one_by_one(tasks):
            learner.outer_gradient(meta_params, task, learner.last_phase, checked=True)
    return work.flops >= HEAVY * max(work.operations, 1)


class _Work(TorchDispatchMode):
    """A context that counts operations, and their multiplications and additions: ``flops``."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # late: it imports triton

        super().__init__()
        self.operations = self.flops = 0
        self._registry = flop_registry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for a second and a half

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        self.operations += 1
        count = self._registry.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.flops += count(*args, **kwargs or {}, out_val=found)
        return found
