"""Raise the library's errors without the errors that caused them: one line tells what to do."""

import contextlib
import re
from collections.abc import Container, Iterator

import torch

from datasets.theirs import places_of_theirs
from maml.errors import UserError


@contextlib.contextmanager
def alone(*, adapting: bool = True) -> Iterator[None]:
    """Remove the causes from a `UserError` that is raised inside; ``adapting``: refuse inference
    mode.

    An exception that passed through the user's own file stays, because the mistake is there.
    """
    if adapting and torch.is_inference_mode_enabled():
        raise UserError("torch.inference_mode allows no adaptation; use torch.no_grad() here")
    try:
        yield
    except UserError as error:
        cause = error.__cause__
        while isinstance(cause, UserError):
            cause = cause.__cause__
        raise error from (cause if cause is not None and places_of_theirs(cause) else None)


def in_words_of_the_library(line: str, names: Container[str]) -> str:
    """Return a line in which each ``--flag`` with one of these names is spelled as an argument."""

    def argument(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return name if name in names else found[0]

    return re.sub(r"--([a-z][a-z-]*)", argument, line)
