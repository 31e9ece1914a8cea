"""Errors that a user can mend, and the exit codes that go with them."""

from datasets.errors import UserError as UserError


class WorkerLostError(Exception):
    """A process of the run stopped answering or failed. ``code``: the exit code."""

    def __init__(self, line: str, code: int = 1) -> None:
        super().__init__(line)
        self.code = code


class DivergedError(WorkerLostError):
    """Processes hold different parameters: all see it at once, and say it in the same words."""


def timed_out(error: BaseException) -> bool:
    """Return whether torch's error says that time ran out: it has no type of its own for that."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
