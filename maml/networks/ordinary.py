"""Turn ordinary modules, ``x → outputs``, into networks with explicit batch statistics.

A network here maps ``(x, statistics)`` to ``(outputs, statistics)`` (`maml.networks.conv4`). An
ordinary module becomes a network when its batch norms are replaced. A batch norm in evaluation
mode, as in a frozen pre-trained body, uses its running statistics, which do not change.
"""

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from maml.errors import UserError
from maml.networks.statistics import BatchNorm, Statistics, Tape, Taped, normalise

AROUND = "module."
"""The prefix that `Ordinary` adds to the names of a module's parameters."""


def own_name(network: nn.Module, name: str) -> str:
    """Return ``name`` as the network's author gave it, without the prefix `AROUND`."""
    return name.removeprefix(AROUND) if isinstance(network, Ordinary) else name


def check_parameters(network: nn.Module, name: str, *, of_run: bool = True) -> None:
    """Refuse parameters that cannot learn; ``of_run``: complex ones, too."""
    for path, module in network.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UserError(
                f"--network {name}: {path or 'it'} makes sparse gradients, which have no second "
                "derivative; make it with sparse=False"
            )
    for where, parameter in network.named_parameters():
        if parameter.is_complex() and of_run:
            raise UserError(
                f"--network {name}: {where} is complex, and a run's files and messages have real "
                "parameters: make it of two real ones by torch.complex, or take maml.MAML"
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise UserError(
                f"--network {name}: {where} is a parameter of {parameter.dtype}, which cannot "
                "learn; make it a buffer"
            )


def is_hooked(module: nn.Module) -> bool:
    """Return whether a hook or a replaced ``forward`` takes part in a module's call."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )


def untie(network: nn.Module) -> dict[str, str]:
    """Keep each shared parameter in its first layer; return ``{other name: first name}``.

    In the other layers it becomes a buffer, which a call replaces (`maml.networks.calls.apply`).
    """
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for path, module in network.named_modules():
        for attribute, parameter in list(module._parameters.items()):
            where = f"{path}.{attribute}" if path else attribute
            if parameter is None or names.setdefault(id(parameter), where) == where:
                continue
            tied[where] = names[id(parameter)]
            del module._parameters[attribute]
            module.register_buffer(attribute, parameter.detach(), persistent=False)
    return tied


def explicit(module: nn.Module, name: str) -> nn.Module:
    """Return ``module`` as a network: itself, if its ``forward`` takes ``statistics`` already.

    ``name`` is the value of ``--network``. Raise `UserError` for a layer that cannot be converted.
    """
    if "statistics" in inspect.signature(module.forward).parameters:
        module.tied = untie(module)  # type: ignore[assignment]
        return module
    for path, layer in module.named_modules():
        what = f"--network {name}: its {type(layer).__name__} ({path or 'all of it'})"
        if isinstance(layer, _BatchNorm) and (
            type(layer).forward is not _BatchNorm.forward
            or is_hooked(layer)
            or parametrize.is_parametrized(layer)
        ):
            raise UserError(
                f"{what} has a forward, hooks or a parametrization of its own, which explicit "
                "batch statistics would leave out; wrap the layer instead"
            )
        running = getattr(layer, "track_running_stats", False)
        if running and not isinstance(layer, _BatchNorm):
            raise UserError(
                f"{what} keeps running statistics, which tasks would share; give it "
                "track_running_stats=False"
            )
    return Ordinary(module)


class Ordinary(nn.Module):
    """An ordinary module as a network; ``tied`` is the result of `untie`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.tape = Tape()
        for part in module.modules():
            if isinstance(part, _BatchNorm):
                _by_tape(part, self.tape)
            elif isinstance(part, Taped):
                part.tape = self.tape
        self.module = module
        self.tied = untie(self)
        self._recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
        head = getattr(module, "head_prefix", None)
        self.head_prefix = f"{AROUND}{head}" if isinstance(head, str) else None
        context = getattr(module, "context_layer", None)
        self.context_layer = f"{AROUND}{context}" if isinstance(context, str) else None

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> tuple[Tensor, Statistics]:
        """Apply the module to ``x [E, …]``: one input, several in order, or several by name."""
        is_wanted = torch.is_grad_enabled()
        # Torch's recurrent layers keep the weights of their last call, here those of a task.
        kept = [(part, part._flat_weights, part._flat_weight_refs) for part in self._recurrent]
        self.tape.begin(statistics)
        try:
            with torch.enable_grad():  # the module may take a gradient of its own
                if isinstance(x, dict):
                    outputs = self.module(**x)
                else:
                    outputs = self.module(*x) if isinstance(x, list | tuple) else self.module(x)
            found = outputs, tuple(self.tape.used)
            return found if is_wanted else pytree.tree_map_only(Tensor, torch.detach, found)
        finally:
            self.tape.begin(None)
            for part, weights, references in kept:
                part._flat_weights, part._flat_weight_refs = weights, references


class ExplicitNorm(_BatchNorm):
    """Batch normalisation over ``x [E, C, …]`` by the statistics of a tape.

    If the layer was in evaluation mode, it uses its running statistics. They are frozen parameters,
    so a checkpoint has them, and ``--init`` finds them by their name in torch. A layer becomes one
    in place, and stays an instance of its class: its network may look for it, or read its sizes.
    """

    tape: Tape
    made_in: bool
    channels: int | None
    """How many its running statistics had, which torch compares with the input's; None: none."""
    _load_from_state_dict = nn.Module._load_from_state_dict  # torch's adds a count of batches

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``; raise ``RuntimeError`` if the mode has changed."""
        if self.training != self.made_in:
            raise RuntimeError(
                "forward switches the mode of a batch norm, which keeps the one that it has when "
                "the network is made: call train() or eval() in __init__"
            )
        self._check_input_dim(input)
        if self.channels not in (None, input.shape[1]):
            raise RuntimeError(
                f"running_mean should contain {input.shape[1]} elements not {self.channels}"
            )
        if self.running_mean is not None and self.running_var is not None:
            own = self.running_mean, self.running_var
            return normalise(input, own, self.weight, self.bias, self.eps)[0]
        given = self.tape.next(1)
        pair = None if given is None else given[0]
        found, used = normalise(input, pair, self.weight, self.bias, self.eps)
        self.tape.used.append(used)
        return found

    def __reduce__(self) -> Any:
        kind = next(base for base in type(self).__mro__ if not issubclass(base, ExplicitNorm))
        return _empty, (kind,), self.__getstate__()


_KINDS: dict[type[_BatchNorm], type[ExplicitNorm]] = {}


def _explicit_kind(kind: type[_BatchNorm]) -> type[ExplicitNorm]:
    """Return the class of a batch norm as an `ExplicitNorm`."""
    return _KINDS.setdefault(kind, type(kind.__name__, (ExplicitNorm, kind), {}))


def _empty(kind: type[_BatchNorm]) -> ExplicitNorm:
    made = _explicit_kind(kind)
    return made.__new__(made)


def _by_tape(norm: _BatchNorm, tape: Tape) -> None:
    """Turn a batch norm into an `ExplicitNorm`."""
    norm.channels = None if norm.running_mean is None else norm.num_features  # type: ignore[assignment]
    for name in ("running_mean", "running_var"):
        frozen = norm._buffers.pop(name, None)
        if frozen is not None:
            frozen = None if norm.training else nn.Parameter(frozen, requires_grad=False)
        norm.register_parameter(name, frozen)
    norm.num_batches_tracked = None
    norm.track_running_stats &= not norm.training
    norm.__class__ = _explicit_kind(type(norm))
    norm.tape, norm.made_in = tape, norm.training  # type: ignore[assignment]


@contextlib.contextmanager
def switched(network: nn.Module, *, training: bool) -> Iterator[None]:
    """Switch a network, or a learner, between training and evaluation mode, which dropout reads.

    Layers that the author has put into evaluation mode stay there, and batch norms keep their mode.
    """
    learning = [m for m in network.modules() if m.training and not isinstance(m, ExplicitNorm)]
    for module in learning:
        module.training = training
    try:
        yield
    finally:  # the others were not touched: another thread may have switched them for a while
        for module in learning:
            module.training = True


# ---- tensors of any network, by name -------------------------------------------------------------


def norm_parameters(network: nn.Module) -> list[str]:
    """Return the names of the scales and shifts of a network's batch normalisations, in order."""
    return [
        f"{path}.{name}" if path else name
        for path, module in network.named_modules()
        if isinstance(module, (BatchNorm, ExplicitNorm))
        for name, tensor in module._parameters.items()
        if tensor is not None and name in ("weight", "bias")
    ]


def to_buffers(network: nn.Module, names: Iterable[str]) -> None:
    """Turn parameters of ``network`` into buffers: a call replaces them, and they do not learn."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = network.get_submodule(path)
        parameter = module._parameters.pop(attribute)
        assert parameter is not None
        module.register_buffer(attribute, parameter.detach())


def tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a network is called with, by name: parameters and buffers."""
    return {name: held[own] for name, (held, own) in _places(network).items()}


@contextlib.contextmanager
def swapped(network: nn.Module, given: dict[str, Tensor]) -> Iterator[None]:
    """Within this context a network has the tensors ``given`` by the names of `tensors`.

    After it, ``given`` has what the network had last. Torch's own function for this finds each
    module by its path, twice: for a network of four small layers that takes longer than the layers.
    """
    places = _places(network)
    places = {name: places[name] for name in given}
    own = {name: held[key] for name, (held, key) in places.items()}
    try:
        for name, (held, key) in places.items():
            held[key] = given[name]
        yield
    finally:
        for name, (held, key) in places.items():
            given[name], held[key] = held.get(key, given[name]), own[name]


def _places(network: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return where a network's modules hold its tensors: the dictionary and the key, by name.

    A layer in two places has its tensors under one name only.
    """
    return {
        f"{path}.{name}" if path else name: (held, name)
        for path, module in network.named_modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    }
