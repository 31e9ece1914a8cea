"""Meta-parameters that go with those of a network: one tensor for each of its names."""

from torch import nn

from maml.params import Params


def tree(params: Params) -> nn.Module:
    """Return a module whose parameters have these names, dots and all; it is never called."""
    root = nn.Module()
    for name, tensor in params.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor.detach().clone()))
    return root
