"""What a file names is not what its reader names: it is imported only where the reader trusts it.

Whoever types a component's name means it. A file (a run's config.yaml, a record) may come from
anybody, and hold any name. There it is a :class:`FromFile`, and :mod:`datasets.theirs` refuses to
import it. Who has been told to trust the file makes a plain ``str`` of it.
"""

from __future__ import annotations


class FromFile(str):
    """A component's name that a file has said, and nobody else; ``str()`` of it is believed."""

    said: str

    def __new__(cls, name: str, said: str) -> FromFile:
        """``name``; ``said`` is the file, with what of a user's own it names."""
        found = super().__new__(cls, name)
        found.said = said
        return found

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.said


def refusal(name: str) -> str:
    """A line about the file that has said ``name``, and what it would import; "" if none has."""
    if not isinstance(name, FromFile):
        return ""
    return f"{name.said}; if you trust it, give --trust, or trust=True in Python"
