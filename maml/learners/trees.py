"""Meta-parameters that go with those of a network: one tensor for each of its names."""

from torch import nn

from maml.params import Params


def tree(params: Params) -> nn.Module:
    """Return a module whose parameters have the names and the values of ``params``.

    The names may have dots, as a network's have; the module is never called. Its parameters come in
    the order of ``params``.
    """
    root = nn.Module()
    for name, tensor in params.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            child = module._modules[part]
            assert child is not None
            module = child
        module.register_parameter(last, nn.Parameter(tensor.detach().clone()))
    return root
