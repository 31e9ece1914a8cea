"""Errors that the user must read and can fix. A traceback would not help."""


class UserError(Exception):
    """Bad input: ``str(error)`` is one line that names the flag or the file. Exit code 2."""


class DataError(UserError, ValueError):
    """Data is missing or damaged, or cannot serve the request."""
