"""What the server and its trainers say to each other."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Order(NamedTuple):
    """From the server: what a trainer does next.

    Attributes:
        kind: "train", "evaluate" or "finish".
        number: Of a train order, the step whose model it carries; of an evaluation, its own.
        ids: ``[T]`` int64 task ids.
        params: ``[P]`` the model, flat; empty where it stays on the server.
        split: The split that is evaluated.
    """

    kind: str
    number: int
    ids: Tensor
    params: Tensor
    split: str = "train"

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        return self.ids.nbytes + self.params.nbytes


class Result(NamedTuple):
    """From a trainer: what came of an order.

    Attributes:
        kind: The order's kind.
        number: The order's number.
        flat: Of a train order ``[P + 1 + M + 1]``, a packed share; of an evaluation the rows
            ``[T, …]``.
        wire_bytes: Bytes that were sent for it, if not those of ``flat``.
    """

    kind: str
    number: int
    flat: Tensor
    wire_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of tensors that were sent for it."""
        return self.flat.nbytes if self.wire_bytes is None else self.wire_bytes
