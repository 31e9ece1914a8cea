"""The errors that a user has to read, and can mend: no traceback helps there."""


class UserError(Exception):
    """Bad input: ``str(error)`` is one line that names the flag or the file. Exit code 2."""


class DataError(UserError, ValueError):
    """Data is missing, damaged, or asked for in a way it cannot serve."""
