"""Errors that the user must read and can fix. A traceback would not help."""

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """Bad input: ``str(error)`` is one line that names the flag or the file. Exit code 2."""

    def __str__(self) -> str:
        """Escape what a terminal would obey, and cut a long line: a file may hold any text."""
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in super().__str__())
        return line if len(line) <= 1500 else f"{line[:1000]} … {line[-400:]}"


class DataError(UserError, ValueError):
    """Data is missing or damaged, or cannot serve the request."""


@contextlib.contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Say which ``extra`` of the installation ``what`` needs, if an import inside finds it missing.

    Raises:
        UserError: in place of a ``ModuleNotFoundError``.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        line = f"{what} needs {error.name}: pip install 'maml-research[{extra}]'"
        raise UserError(line) from error
