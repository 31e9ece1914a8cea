"""What guards a meta-learner: checks of what its losses read, write and freeze; other threads."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from maml.errors import UserError
from maml.execution.outside import Reached
from maml.execution.threads import copied
from maml.learners import Learner
from maml.library.agreement import OF_TORCH
from maml.metagradient.reading import ForeignError, UnreadError
from maml.networks.calls import alone_with, lost_writes
from maml.networks.headless import in_short
from maml.networks.ordinary import ExplicitNorm, own_name
from maml.params import Params

Learning: TypeAlias = list[tuple[str, nn.Parameter, bool | None]]
"""Each parameter of a network, with its name, and whether it learns; None: it is a statistic."""
INNER = "inner_lr", "inner_steps", "inner_optimizer", "eval_inner_steps"


def reached(loss: Any, module: nn.Module) -> list[tuple[str, str]]:
    """Return what a loss reaches by name: parts of a module (path, ""), and their attributes."""
    values = Reached(loss).values
    ids = set(map(id, values))
    held = ((path, {"": part, **vars(part)}) for path, part in module.named_modules())
    return [(path, name) for path, own in held for name, value in own.items() if id(value) in ids]


def check(
    learner: Learner, params: Params, tasks: Any, phase: int, reaching: list[tuple[str, str]]
) -> None:
    """Check which parameters the losses read, once for each phase; warn of writes that are lost.

    ``reaching``: what the loss has `reached` of the user's module. The learner calls a copy.
    """

    def look() -> None:
        if _keeps(learner.network, reaching):
            warnings.warn(
                "loss: it reaches the module, where forward keeps what it computes, but the "
                "learner calls a copy: if the loss reads this, it sees an old value; let forward "
                "return it",
                stacklevel=2,
            )

    try:
        with lost_writes(lambda line: warnings.warn(f"module: {line}", stacklevel=2)):
            learner.checked_way(params, tasks, phase, look)
    except ForeignError as error:
        raise UserError(
            "the loss reads a parameter that is not the module's, or not by calling the module, "
            "which cannot learn here: put it into the module (layers in a Python list: into "
            "nn.ModuleList; a function that reads it: as a method; a view of it: made in forward) "
            "and let forward return what the loss needs of it, or take an outer loss of your own "
            "by adapt()"
        ) from error
    except UnreadError as error:
        unread = in_short(own_name(learner.network, name) for name in error.names)
        raise UserError(
            f'no loss reads {unread}: make the learner again with freeze="…", a pattern of these '
            'names as "layer.*", or begin with tasks whose branch of the module reads them'
        ) from error


def _keeps(network: nn.Module, names: list[tuple[str, str]]) -> bool:
    """Return whether one of these holds the result of a computation: see `reached`."""
    parts = {own_name(network, f"{path}.")[:-1]: part for path, part in network.named_modules()}
    own = [(vars(parts[path]), name) for path, name in names if path in parts]
    held = [of.get(name) for of, name in own]
    held += [v for of, name in own if not name for n, v in of.items() if n not in OF_TORCH]
    there = Reached(*held).values
    return any(isinstance(value, Tensor) and value.grad_fn is not None for value in there)


def begin_learning(learner: Learner) -> Learning:
    """Freeze what the learner has frozen; return which parameters of its network learn."""
    network = learner.network
    for name in learner.frozen:
        network.get_parameter(name).requires_grad_(False)
    norms = [module for module in network.modules() if isinstance(module, ExplicitNorm)]
    running = {id(tensor) for norm in norms for tensor in (norm.running_mean, norm.running_var)}
    return [
        (own_name(network, n), p, None if id(p) in running else p.requires_grad)
        for n, p in network.named_parameters()
    ]


def check_learning(learning: Learning) -> None:
    """Refuse a change of what is frozen, unless all is: then the network only adapts.

    Freeze statistics again, as ``learner.requires_grad_()`` unfreezes them, too.
    """
    for _, parameter, learns in learning:
        if learns is None:
            parameter.requires_grad_(False)
    for name, parameter, learns in learning:
        if bool(learns) != parameter.requires_grad and any(p.requires_grad for _, p, _ in learning):
            raise UserError(
                f"{name} was {'frozen' if learns else 'unfrozen'} after the learner was made; "
                "the inner loop would not follow: make the learner again; it shares the tensors"
            )


class Waiting(nn.Module):
    """A module with a learner. A call puts a task's tensors into the network. So the methods that
    read or change tensors wait for calls in other threads to end.
    """

    learner: Learner

    def __setattr__(self, name: str, value: Any) -> None:
        config = self.learner.config if name in INNER and hasattr(self, "learner") else None
        if config is not None and getattr(config, name) != value:
            raise UserError(
                f"{name} = {value!r}: it is {getattr(config, name)!r} since the learner was made: "
                "make the learner again; it shares the tensors"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(
                "a meta-learner has no clone: fast = learner.adapt(support_x, support_y) returns "
                "the module after its adaptation, and learner(tasks) the outer loss"
            )
        return super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        with alone_with(self.learner.network):
            memo[id(self)] = made = type(self).__new__(type(self))
            vars(made).update(copy.deepcopy(vars(self), memo))
            return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What is returned is written later, so it is a copy, which shares the tensors.
        with alone_with(self.learner.network):
            return object.__reduce_ex__(copied(self) or self, protocol)

    def named_parameters(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return what torch's method returns."""
        with alone_with(self.learner.network):
            return iter([*super().named_parameters(*given, **named)])

    def state_dict(self, *given: Any, **named: Any) -> Any:
        """Return what torch's method returns."""
        with alone_with(self.learner.network):
            return super().state_dict(*given, **named)

    def load_state_dict(self, *given: Any, **named: Any) -> Any:
        """Do what torch's method does."""
        with alone_with(self.learner.network):
            return super().load_state_dict(*given, **named)

    def _load_from_state_dict(self, saved: Any, prefix: str, how: Any, *given: Any) -> None:
        if how.get("assign_to_params_buffers"):
            raise UserError("assign=True: the module would keep the old tensors; leave it out")
        super()._load_from_state_dict(saved, prefix, how, *given)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with alone_with(self.learner.network):
            held = [(part, dict(part._buffers)) for part in self.modules()]
            super()._apply(fn, recurse)
            # The user's module shares buffers, too. Torch changes only parameters in place.
            for part, buffers in held:
                for name, old in buffers.items():
                    new = part._buffers[name]
                    if old is None or new is None or old.layout != torch.strided:
                        continue
                    if torch._has_compatible_shallow_copy_type(old, new):
                        old.data, part._buffers[name] = new, old
        return self
