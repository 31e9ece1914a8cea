"""What guards a meta-learner: checks of what its losses read, write and freeze; other threads."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from maml.errors import UserError
from maml.execution.outside import kept_outside
from maml.learners import Learner
from maml.library.distribution import OF_TORCH
from maml.metagradient.reading import ForeignError, UnreadError
from maml.networks.calls import alone_with, lost_writes
from maml.networks.headless import in_short
from maml.networks.ordinary import ExplicitNorm, own_name
from maml.params import Params

Learning: TypeAlias = list[tuple[str, nn.Parameter, bool | None]]
"""Each parameter of a network, with its name, and whether it learns; None: it is a statistic."""
INNER = "inner_lr", "inner_steps", "inner_optimizer", "eval_inner_steps"


def reaches(loss: Any, module: nn.Module) -> bool:
    """Return whether a loss reaches a module, a part of it, or what a part may write into."""
    held = (value for part in module.modules() for value in (part, *_own(part)))
    parts = {id(v) for v in held if isinstance(v, nn.Module | list | dict | set) or _is_object(v)}
    return any(id(value) in parts for value in kept_outside(nn.Identity(), loss))


def _own(part: nn.Module) -> list[Any]:
    """Return the values of a module's own attributes."""
    return [value for name, value in vars(part).items() if name not in OF_TORCH]


def _is_object(value: Any) -> bool:
    """Return whether a value is an object with attributes of its own, as a namespace."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor)


def check(
    learner: Learner, params: Params, tasks: Any, phase: int, *, reaching: bool = False
) -> None:
    """Check which parameters the losses read, once for each phase; warn of writes that are lost.

    With ``reaching``, the loss reaches the user's module, of which the learner calls a copy.
    """
    try:
        with lost_writes(lambda line: warnings.warn(f"module: {line}", stacklevel=2)):
            learner.checked_way(params, tasks, phase)
    except ForeignError as error:
        raise UserError(
            "the loss reads a parameter that is not the module's, or not by calling the module, "
            "which cannot learn here: put it into the module (layers in a Python list: into "
            "nn.ModuleList; a function that reads it: as a method) and let forward return what the "
            "loss needs of it, or take an outer loss of your own by adapt()"
        ) from error
    except UnreadError as error:
        unread = in_short(own_name(learner.network, name) for name in error.names)
        raise UserError(
            f'no loss reads {unread}: make the learner again with freeze="…", a pattern of these '
            'names as "layer.*", or begin with tasks whose branch of the module reads them'
        ) from error
    if reaching and any(map(_keeps, learner.network.modules())):
        warnings.warn(
            "loss: it reaches the module, where forward keeps what it computes, but the learner "
            "calls a copy: if the loss reads this, it sees an old value; let forward return it",
            stacklevel=2,
        )


def _keeps(part: nn.Module) -> bool:
    """Return whether a module holds the result of a computation as an attribute."""
    leaves = pytree.tree_leaves([vars(own) if _is_object(own) else own for own in _own(part)])
    return any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves)


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

    def named_parameters(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return what torch's method returns."""
        with alone_with(self.learner.network):
            return iter([*super().named_parameters(*given, **named)])

    def state_dict(self, *given: Any, **named: Any) -> Any:
        """Return what torch's method returns."""
        with alone_with(self.learner.network):
            return super().state_dict(*given, **named)

    def load_state_dict(self, *given: Any, **named: Any) -> Any:
        """Do what torch's method does. Refuse ``assign=True``, which takes the tensors apart."""
        if named.get("assign"):
            raise UserError("assign=True: the module would keep the old tensors; leave it out")
        with alone_with(self.learner.network):
            return super().load_state_dict(*given, **named)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with alone_with(self.learner.network):
            held = [(part, dict(part._buffers)) for part in self.modules()]
            super()._apply(fn, recurse)
            # The user's module shares buffers, too. Torch changes only parameters in place.
            for part, buffers in held:
                for name, buffer in buffers.items():
                    if buffer is not None and (made := part._buffers[name]) is not None:
                        buffer.data, part._buffers[name] = made, buffer
        return self
