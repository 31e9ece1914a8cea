"""Errors that a user can fix, and errors of lost processes with their exit codes."""

from datasets.errors import UserError as UserError


class Done(SystemExit):
    """A command has printed what it was asked for, such as its help, and has no more to do."""


class WorkerLostError(Exception):
    """A process of the run stopped answering or failed. ``code``: the exit code."""

    def __init__(self, line: str, code: int = 1) -> None:
        super().__init__(line)
        self.code = code


class DivergedError(WorkerLostError):
    """Processes hold different parameters. Every rank raises this error, with the same text."""


def timed_out(error: BaseException) -> bool:
    """Return whether an error of torch is a timeout; torch has no own exception type for it."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
