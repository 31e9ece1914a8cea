"""A network's batch normalisations: which parameters are theirs."""

from collections.abc import Iterable

from torch import Tensor, nn

from maml.networks.ordinary import ExplicitNorm
from maml.networks.statistics import BatchNorm


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
    """Turn parameters of ``network`` into buffers: tensors it is called with, that do not learn."""
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = network.get_submodule(path)
        parameter = module._parameters.pop(attribute)
        assert parameter is not None
        module.register_buffer(attribute, parameter.detach())


def tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return all that a network is called with, by name: parameters and buffers."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in network.named_modules()
        for name, tensor in (module._parameters | module._buffers).items()
        if tensor is not None
    }
