"""Ordinary modules, ``x → outputs``, made to serve as networks with explicit batch statistics.

A network here maps ``(x, statistics)`` to ``(outputs, statistics)`` (`maml.networks.conv4`). An
ordinary module becomes one: its batch normalisations use, and hand out, the statistics of the batch
at hand, or use those that they are given; they keep no running ones, as nothing may be shared
between tasks. A batch norm that its author has put into evaluation mode, as in a frozen pre-trained
body, uses its running statistics, which stay as they are.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.batchnorm import _BatchNorm

from maml.errors import UserError
from maml.networks.statistics import Statistics

AROUND = "module."
"""What stands before the names that an ordinary module's author gave its parameters."""


def own_name(network: nn.Module, name: str) -> str:
    """Return the name that a network's author gave what is called ``name`` here."""
    return name.removeprefix(AROUND) if isinstance(network, Ordinary) else name


def check_parameters(network: nn.Module, name: str) -> None:
    """Refuse what would be trained otherwise than its author thinks."""
    seen: dict[int, str] = {}
    for path, module in network.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UserError(
                f"--network {name}: {path or 'it'} makes sparse gradients, which have no second "
                "derivative; make it with sparse=False"
            )
        for attribute, parameter in module._parameters.items():
            where = f"{path}.{attribute}" if path else attribute
            if parameter is None:
                continue
            if not parameter.is_floating_point():
                raise UserError(
                    f"--network {name}: {where} is a parameter of {parameter.dtype}, which cannot "
                    "learn; make it a buffer"
                )
            if seen.setdefault(id(parameter), where) != where:
                raise UserError(
                    f"--network {name}: {where} and {seen[id(parameter)]} are one parameter; share "
                    "the layer, not its weight"
                )


def explicit(module: nn.Module, name: str) -> nn.Module:
    """Return ``module`` as a network; itself, if its ``forward`` takes ``statistics`` already.

    ``name`` is what ``--network`` was given.

    Raises:
        UserError: if it keeps running statistics of another kind than batch norm.
    """
    if "statistics" in inspect.signature(module.forward).parameters:
        return module
    for path, layer in module.named_modules():
        what = f"--network {name}: its {type(layer).__name__} ({path or 'all of it'})"
        if isinstance(layer, _BatchNorm) and (
            type(layer).forward is not _BatchNorm.forward
            or layer._forward_hooks
            or layer._forward_pre_hooks
        ):
            raise UserError(
                f"{what} has a forward or hooks of its own, which explicit batch statistics would "
                "leave out; wrap the layer instead"
            )
        running = getattr(layer, "track_running_stats", False)
        if running and not isinstance(layer, _BatchNorm):
            raise UserError(
                f"{what} keeps running statistics, which tasks would share; give it "
                "track_running_stats=False"
            )
    return Ordinary(module)


class Ordinary(nn.Module):
    """An ordinary module as a network.

    Attributes:
        head_prefix: Of the names of the output layer's parameters, if the module says it.
        context_layer: The name of the layer that a context modulates (CAVIA), likewise.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.tape = _Tape()
        self.module = _replaced(module, self.tape)
        head = getattr(module, "head_prefix", None)
        self.head_prefix = f"{AROUND}{head}" if isinstance(head, str) else None
        context = getattr(module, "context_layer", None)
        self.context_layer = f"{AROUND}{context}" if isinstance(context, str) else None

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> tuple[Tensor, Statistics]:
        """Apply the module to ``x [E, …]``."""
        self.tape.begin(statistics)
        return self.module(x), tuple(self.tape.used)


class _Tape:
    """The statistics of one forward pass, in order of use."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, given: Statistics | None) -> None:
        self.given = given
        self.used: list[tuple[Tensor, Tensor]] = []

    def next(self, x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
        if self.given is None:
            variance, mean = torch.var_mean(x, dim=dims, correction=0)
        else:
            mean, variance = self.given[len(self.used)]
        self.used.append((mean, variance))
        return mean, variance

    def __getstate__(self) -> dict[str, object]:
        # What a pass leaves behind may belong to autograd, or to vmap; it is of no use later.
        return {"given": None, "used": []}


class ExplicitNorm(nn.Module):
    """Batch normalisation over ``x [E, C, …]`` by the statistics of a tape.

    By its running statistics, where ``norm`` was in evaluation mode. They are parameters, which are
    frozen: a checkpoint has them, and ``--init`` finds them by their name in torch.
    """

    def __init__(self, norm: _BatchNorm, tape: _Tape) -> None:
        super().__init__()
        self.eps, self.tape = norm.eps, tape
        self.training = self._made_in = norm.training
        # None where the layer has no scale and shift of its own.
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean: nn.Parameter | None = None
        self.running_var: nn.Parameter | None = None
        if not norm.training and norm.running_mean is not None and norm.running_var is not None:
            self.running_mean = nn.Parameter(norm.running_mean, requires_grad=False)
            self.running_var = nn.Parameter(norm.running_var, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``; refuse another mode than that which ``norm`` was made in."""
        if self.training != self._made_in:
            raise RuntimeError(
                "forward switches the mode of a batch norm, which keeps the one that it has when "
                "the network is made: call train() or eval() in __init__"
            )
        if self.running_mean is not None and self.running_var is not None:
            mean: Tensor = self.running_mean
            variance: Tensor = self.running_var
        elif self.tape.given is None and not is_functorch_wrapped_tensor(x):
            # As fast as torch's own layer. torch.func batches its gradient wrongly.
            normalised, mean, scale = torch.native_batch_norm(
                x, self.weight, self.bias, None, None, True, 0.0, self.eps
            )
            with torch.no_grad():
                self.tape.used.append((mean, scale**-2 - self.eps))
            return normalised
        else:
            mean, variance = self.tape.next(x, [d for d in range(x.dim()) if d != 1])
        # A tensor, not a number: see `maml.networks.statistics.BatchNorm`.
        scale = torch.rsqrt(variance + variance.new_full((), self.eps))
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        shape = [-1 if d == 1 else 1 for d in range(x.dim())]
        return x * scale.view(shape) + shift.view(shape)


@contextlib.contextmanager
def switched(network: nn.Module, *, training: bool) -> Iterator[None]:
    """Switch a network between training and test, as dropout reads it.

    What its author has put into evaluation mode stays there, and batch norms stay as they are made.
    """
    modes = {m: m.training for m in network.modules() if not isinstance(m, ExplicitNorm)}
    for module, made_training in modes.items():
        module.training = made_training and training
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _replaced(
    module: nn.Module, tape: _Tape, made: dict[nn.Module, nn.Module] | None = None
) -> nn.Module:
    """Return ``module`` with its batch normalisations, or itself, made explicit.

    One that stands in two places is made once: its weights are shared.
    """
    made = {} if made is None else made
    if isinstance(module, _BatchNorm):
        if module not in made:
            made[module] = ExplicitNorm(module, tape)
        return made[module]
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _replaced(child, tape, made)
    return module
