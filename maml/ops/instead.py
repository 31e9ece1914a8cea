"""Use the operations of this room in place of torch's, within a context and in one thread."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from maml.ops import convolution, recurrent
from maml.ops.attention import attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return attention(
        query, key, value, attn_mask,
        dropout=dropout_p, causal=is_causal, scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip


_INSTEAD: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    torch.lstm: recurrent.lstm,
    torch.gru: recurrent.gru,
    torch.rnn_tanh: recurrent.rnn_tanh,
    torch.rnn_relu: recurrent.rnn_relu,
    **convolution.INSTEAD,
}


class Instead(TorchFunctionMode):
    """A context in which torch's functions are computed by the operations of this room."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _INSTEAD.get(func, func)(*args, **kwargs or {})
