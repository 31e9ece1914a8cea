"""Operations with the second derivatives that torch lacks; torch's functions stay the interface."""

from maml.ops.attention_by_blocks import attention

__all__ = ["attention"]
