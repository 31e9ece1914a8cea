"""A process's place among all, as whoever started it says in the environment. No torch here."""

import os
from typing import NamedTuple

from maml.errors import UserError


class World(NamedTuple):
    """A process's place among all. ``launched``: whether torchrun (or alike) started it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launched: bool

    @classmethod
    def from_environment(cls) -> "World":
        """Read the variables that torchrun sets; one process without them.

        Raises:
            UserError: naming the variable, if they cannot be: a job script may set them.
        """

        def number(name: str, default: int, least: int, most: int | None = None) -> int:
            text = os.environ.get(name, str(default))
            if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
                bounds = f"at least {least}" if most is None else f"{least} to {most}"
                raise UserError(f"{name}={text} in the environment: must be a number, {bounds}")
            return int(text)

        size = number("WORLD_SIZE", 1, 1)
        if size > 1:
            for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
                if name not in os.environ:
                    raise UserError(f"WORLD_SIZE={size} in the environment, but no {name}")
        local_size = number("LOCAL_WORLD_SIZE", 1, 1, size)
        return cls(
            rank=number("RANK", 0, 0, size - 1),
            size=size,
            local_rank=number("LOCAL_RANK", 0, 0, local_size - 1),
            local_size=local_size,
            launched="RANK" in os.environ,
        )
