"""The one error a user of the data sets has to read."""


class DataError(ValueError):
    """Data is missing, damaged, or asked for in a way it cannot serve.

    The message is one line that names the flag or the file to change. Commands print ``str(error)``
    and leave with exit status 2: no traceback helps here.
    """
