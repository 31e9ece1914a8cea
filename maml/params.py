"""Parameters by name: what learns, what adapts, and their gradients."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
