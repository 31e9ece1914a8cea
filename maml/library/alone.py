"""An error of the library comes alone: its line says what to do, and tracebacks say no more."""

import contextlib
import re
from collections.abc import Container, Iterator

import torch

from datasets.theirs import places_of_theirs
from maml.errors import UserError


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let errors of bad input inside be a `UserError` without those that it was made of.

    An exception that arose in a file of the user's own stays its cause: there is the mistake.
    """
    if torch.is_inference_mode_enabled():
        raise UserError("torch.inference_mode allows no adaptation; use torch.no_grad() here")
    try:
        yield
    except UserError as error:
        cause = error.__cause__
        while isinstance(cause, UserError):
            cause = cause.__cause__
        raise error from (cause if cause is not None and places_of_theirs(cause) else None)


def in_words_of_the_library(line: str, names: Container[str]) -> str:
    """Return a line about the program's flags as one about arguments of these names."""

    def argument(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return name if name in names else found[0]

    return re.sub(r"--([a-z][a-z-]*)", argument, line)
