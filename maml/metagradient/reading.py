"""Check which parameters the losses read, by the graph of each loss on a task."""

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from datasets.generators import state
from maml.errors import UserError
from maml.metagradient import draws
from maml.metagradient.by_task import Way, one_by_one, unstacked
from maml.metagradient.problem import Problem, Transform, called
from maml.networks.stack import is_stack
from maml.params import Params

MOST_DRAWS = 100
"""Look so many times for a parameter that losses read by chance, as a layer that they may skip."""


class ForeignError(ValueError):
    """A loss reads parameters that are not among its arguments."""


class UnreadError(RuntimeError):
    """No loss reads the parameters ``names``."""

    def __init__(self, line: str, names: list[str]) -> None:
        super().__init__(line)
        self.names = names


def checked_way(problem: Problem, tasks: Any, way: Way, frozen: Collection[str] = ()) -> Way:
    """Refuse losses that read other parameters than they should; return the way.

    In place of "auto", return "mixed" if compiled kernels read parameters that adapt or belong to
    one step. The problem's tensors must require gradients.

    Raises:
        ForeignError: if a loss reads parameters that are not among its arguments. Every way of
            differentiating treats what a function closes over as a constant.
        UnreadError: for parameters that no loss reads, unless ``frozen``: a mistake, not a zero
            gradient.
    """
    every = unread = {*problem.start, *problem.fixed}.difference(frozen)
    by_kernels = set[str]()
    # The query is last, because it may read what the network has kept of a support set.
    places = [*(("support", step) for step in range(problem.steps)), ("query", problem.last_step)]
    # Neither a transform's updates nor a displacement need the gradient of this loss.
    needless = "support" if problem.transform else "query" if problem.displacement else ""
    constant = {part for part, _ in places} - {needless}
    before = state()
    for _ in range(MOST_DRAWS):
        for place, task in enumerate(one_by_one(tasks)):
            # With control flow, another task may read other parameters.
            if place and not (unread or constant):
                break
            for part, step in places:
                # A loss may depend on the step: look at further steps while a parameter is unread.
                if unread or constant or (not place and (part == "query" or not step)):
                    names, of_kernels = _read(problem, part, step, task)
                    unread, by_kernels = unread - names, by_kernels | of_kernels
                    constant = constant - {part} if names else constant
        if not (unread or constant) or state() == before:
            break
    if problem.transform is not None:
        unread = unread - _read_by_updates(problem.start, problem.transform, every - unread)
    if constant:
        raise RuntimeError(
            f"the {min(constant)} loss depends on no parameter: compute it by torch from the "
            "outputs, and detach nothing on the way"
        )
    if unread:
        name = min(unread)
        what = "adapt" if name in problem.start else "be learned"
        raise UnreadError(
            f"{name!r} appears to not have been used by any loss, but it is to {what}; "
            "call requires_grad_(False) on it if it is not to change, or begin with tasks whose "
            "branch of the network reads it",
            sorted(unread),
        )
    return "mixed" if way == "auto" and not by_kernels <= problem.fixed.keys() else way


def _read_by_updates(start: Params, transform: Transform, read: set[str]) -> set[str]:
    """Return the names of ``start`` on which updates of the names ``read`` depend, as a state does.

    Raise `ForeignError` if a transform reads parameters that are not among its arguments.
    """
    groups = [
        {n: t.detach().clone().requires_grad_() for n, t in group.items()}
        for group in (start, start, transform.tensors)
    ]
    gradients, weights, tensors = groups
    try:
        called = [transform._replace(tensors=tensors).changed(gradients, weights) for _ in "ab"]
    except Exception:  # these are no gradients, so a factorisation, say, may fail
        return set(start)
    under, again = ({n: _leaves_under(t)[0] for n, t in each.items()} for each in called)
    # As in `_read`, only a leaf of both calls comes from outside.
    foreign = set().union(*under.values()) & set().union(*again.values())
    if foreign - {id(t) for group in groups for t in group.values()}:
        raise ForeignError(
            "the transform reads parameters that are not among its tensors, and would not be "
            "differentiated by them: put them into the tensors of the Transform"
        )
    before = set[str]()
    while read != before:
        before, of = read, set[int]().union(*(under[name] for name in read & under.keys()))
        read = read | {name for name, weight in weights.items() if id(weight) in of}
    return read


def _read(problem: Problem, part: str, step: int, task: Any) -> tuple[set[str], set[str]]:
    """Return the names that a loss reads on a batch of one, and those of them that kernels read."""
    at = problem.params(problem.start, step)
    params = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}

    def look() -> Tensor:
        with draws.at(part, step):
            return called(getattr(problem, part), params, next(unstacked(task)), step)[0]

    value = look()
    leaves, of_kernels = _leaves_under(value)
    names = {name for name, tensor in params.items() if id(tensor) in leaves}
    # Some leaves are made by the call, like an input by which an energy is differentiated. Those
    # differ in the next call, so only a leaf of both calls comes from outside.
    if len(leaves) > len(names) and len(leaves & _leaves_under(look())[0]) > len(names):
        raise ForeignError(
            f"the {part} loss reads parameters that are not among its params, and would not be "
            "differentiated by them: put them into the problem's fixed, and read them from "
            "params. A module does not know of layers in a Python list: keep them in nn.ModuleList"
        )
    return names, {name for name in names if id(params[name]) in of_kernels}


def _leaves_under(value: Tensor) -> tuple[set[int], set[int]]:
    """Return the ids of the leaves of a value's graph, and of those leaves that kernels read."""
    if value.grad_fn is None:
        return {id(value)} if value.requires_grad else set(), set()
    found: tuple[set[int], set[int]] = set(), set()
    seen, waiting = set(), [(value.grad_fn, False)]
    while waiting:
        node, of_kernels = waiting.pop()
        of_kernels = of_kernels or is_stack(node)
        if (node, of_kernels) in seen:
            continue
        seen.add((node, of_kernels))
        if isinstance(node, CheckpointFunction._backward_cls):
            raise UserError(
                "torch.utils.checkpoint with use_reentrant=True hides its parameters from "
                "torch.autograd.grad, which an inner loop needs: call it with use_reentrant=False"
            )
        if hasattr(node, "variable"):
            found[0].add(id(node.variable))
            if of_kernels:
                found[1].add(id(node.variable))
        waiting += [(before, of_kernels) for before, _ in node.next_functions if before is not None]
    return found
