"""Errors that a user can fix, and errors of lost processes with their exit codes."""

from collections.abc import Mapping
from typing import Any

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


def exit_code(error: BaseException) -> int:
    """Return the exit code of all processes of a run in which one fails with ``error``."""
    if isinstance(error, WorkerLostError):
        return error.code
    return 2 if isinstance(error, UserError) else 1


def timed_out(error: BaseException) -> bool:
    """Return whether an error of torch is a timeout; torch has no own exception type for it."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], rank: int) -> str:
    """Return "NAME is X on rank 0 and Y on rank N" for what differs first on a rank, or ""."""
    for name in {**ours, **theirs}:
        here, there = (of.get(name, "missing") for of in (ours, theirs))
        if here != there:
            return f"{name} is {here} on rank 0 and {there} on rank {rank}"
    return ""
