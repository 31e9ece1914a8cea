"""Use the operations of this room in place of torch's, within a context and in one thread."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from maml.execution.meanwhile import Replaced
from maml.ops import (
    convolution,
    embedding,
    norms,
    packed,
    recurrent,
    spectral_norm,
    weight_norm,
)
from maml.ops.attention_by_blocks import attention
from maml.ops.checkpoint import again_in

_WITHIN_TORCH = Replaced(F, "scaled_dot_product_attention", lambda _, *a, **n: attention(*a, **n))


def _multi_head(*args: Any, **kwargs: Any) -> Any:
    """Return what torch's function does, whose own calls of torch the mode does not see."""
    with _WITHIN_TORCH:
        return F.multi_head_attention_forward(*args, **kwargs)


_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: _multi_head,
    torch.lstm: recurrent.lstm,
    torch.gru: recurrent.gru,
    torch.rnn_tanh: recurrent.rnn_tanh,
    torch.rnn_relu: recurrent.rnn_relu,
    **convolution.INSTEAD,
    **embedding.INSTEAD,
    **norms.INSTEAD,
    **packed.INSTEAD,
    **spectral_norm.INSTEAD,
    **weight_norm.INSTEAD,
}


@contextlib.contextmanager
def instead() -> Iterator[None]:
    """Compute torch's functions by the operations of this room, within this context."""
    # One mode is enough: a second one would see what the first one calls.
    if any(isinstance(mode, _Instead) for mode in _get_current_function_mode_stack()):
        yield
    else:
        with _Instead(), again_in(lambda: instead):
            yield


class _Instead(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _INSTEAD.get(func, func)(*args, **kwargs or {})
