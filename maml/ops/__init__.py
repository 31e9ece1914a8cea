"""Operations with the second derivatives that torch lacks; torch's functions stay the interface."""

from maml.ops.attention import attention

__all__ = ["attention"]
