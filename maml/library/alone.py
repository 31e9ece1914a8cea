"""An error of the library comes alone: its line says what to do, and tracebacks say no more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from datasets.blame import places_of_theirs
from datasets.errors import DataError
from maml.errors import UserError


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let bad input inside end in a `UserError` without the errors that it was made of.

    An exception that arose in a file of the user's own stays its cause: there is the mistake.

    Raises:
        UserError: for that, and for a ``DataError``, of the same line.
    """
    try:
        yield
    except (UserError, DataError) as error:
        cause = error.__cause__
        while isinstance(cause, (UserError, DataError)):
            cause = cause.__cause__
        if cause is not None and not places_of_theirs(cause):
            cause = None
        raise (error if isinstance(error, UserError) else UserError(str(error))) from cause
