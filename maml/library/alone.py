"""An error of the library comes alone: its line says what to do, and tracebacks say no more."""

import contextlib
import re
from collections.abc import Container, Iterator

import torch

from datasets.errors import DataError
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
    except (UserError, DataError) as error:
        cause = error.__cause__
        while isinstance(cause, (UserError, DataError)):
            cause = cause.__cause__
        if cause is not None and not places_of_theirs(cause):
            cause = None
        raise (error if isinstance(error, UserError) else UserError(str(error))) from cause


def in_words_of_the_library(line: str, names: Container[str]) -> str:
    """Return a line about the program's flags as one about arguments of these names."""

    def argument(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return name if name in names else found[0]

    return re.sub(r"--([a-z][a-z-]*)", argument, line)
