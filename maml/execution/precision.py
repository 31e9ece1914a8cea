"""``--precision``: how exactly float32 is multiplied.

Weights, gradients, batch statistics, losses and the optimizers are float32 in each; what differs is
the arithmetic of convolutions and matrix products:

- ``float32``: float32 throughout.
- ``tf32``: factors rounded to 10 bits of mantissa, sums in float32, where the device has it: a GPU
  from Ampere on, or a CPU with AMX-FP16 (its matrix products alone). Elsewhere it is float32.
- ``bf16``: factors and results of the network's products rounded to bfloat16 (7 bits), and so in
  the derivatives of the network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

PRODUCTS = frozenset(
    (
        F.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.matmul, Tensor.matmul,
        Tensor.__matmul__, torch.mm, torch.bmm, torch.addmm, torch.baddbmm,
    )
)  # fmt: skip
"""What is rounded to bfloat16."""


def use(precision: str) -> None:
    """Set this process's float32 arithmetic as ``--precision`` says."""
    tf32 = precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # Torch's own default is True: convolutions in TF32 without being asked.
    torch.backends.cudnn.allow_tf32 = tf32


def products(precision: str) -> contextlib.AbstractContextManager[object]:
    """Return the context of the network's forward pass."""
    return _Bfloat16Products() if precision == "bf16" else contextlib.nullcontext()


class _Bfloat16Products(TorchFunctionMode):
    """Rounds what is multiplied to bfloat16; the product is bfloat16, too.

    Not ``torch.autocast``: on a CPU (torch 2.15) it misses the convolutions of ``torch.func.vmap``
    over weights, which is every inner step but the first.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS:
            args = [_rounded(value) for value in args]
            kwargs = {name: _rounded(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _rounded(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.to(torch.bfloat16)
    return value
