"""Copy a user's module. The copy has modules of its own, and the tensors of the original."""

import copy
from typing import Any

from torch import Tensor, jit, nn

from maml.errors import UserError
from maml.execution.copies import closed_copy


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module. Both share all tensors, and what cannot be copied.

    Raises:
        UserError: for a module that cannot be copied.
    """
    shared = dict[int, Any]()
    for path, part in module.named_modules():
        if isinstance(part, jit.ScriptModule) or type(part).__name__ == "OptimizedModule":
            by = "torch.jit.script" if isinstance(part, jit.ScriptModule) else "torch.compile"
            raise UserError(
                f"module: {path or 'it'} is compiled by {by}, so its tensors cannot be replaced by "
                f"a task's, or it has no second derivative; give the module before {by}"
            )
        tensors = [t for t in vars(part).values() if isinstance(t, Tensor)]
        # A hook makes some anew at each call, as those of torch.nn.utils.prune and weight_norm do.
        made = bool(part._forward_pre_hooks)
        shared |= {id(t): t if t.is_leaf and not made else t.detach() for t in tensors}
    try:
        return closed_copy(module, dict(shared))
    except Exception:
        shared |= _stubborn(module, shared)
    try:
        return closed_copy(module, shared)
    except Exception as error:
        line = " ".join(str(error).split())
        raise UserError(f"module: it cannot be copied ({line})") from error


def _stubborn(module: nn.Module, shared: dict[int, Any]) -> dict[int, Any]:
    """Return the values of attributes that cannot be copied, as locks and open files, by id."""
    known = shared | {id(part): part for part in module.modules()}
    found, of_torch = dict[int, Any](), vars(nn.Module())
    for part in module.modules():
        for name, value in vars(part).items():
            try:
                if name not in of_torch:
                    copy.deepcopy(value, dict(known))
            except Exception:
                found[id(value)] = value
    return found
