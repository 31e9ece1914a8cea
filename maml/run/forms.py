"""The forms of what a run's files hold. A file may be a stranger's, so its types are checked.

A form is a type, a tuple of other forms, ``[form]`` for a list, ``{str: form}`` for a dictionary
with any keys, or ``{name: form}`` for one with these entries and others. A missing entry is None.
"""

from typing import Any, TypeAlias

Form: TypeAlias = Any

NUMBER = float | int
CLASSES = {str: [str]}
STATUS = {"state": str, "iteration": int}
RESULT = {
    "tasks": int, "transductive": bool, "iterations": int | None, "tested_iteration": int | None,
    "skipped": int | None, "ensemble": ([int], None),
}  # fmt: skip
MACHINE = {"processor": str, "gpu": str | None}
START = {
    "git_commit": str | None, "iteration": int | None, "processes": int | None,
    "threads": int | None, "machine": (MACHINE, None), "own_files": ({str: {str: str}}, None),
}  # fmt: skip
RECORD = {
    "starts": [START], "minutes": NUMBER, "note": str, "hardware": MACHINE | {"date": str},
    "division": str | None, "model_sha256": str | None, "model_bytes": int | None,
}  # fmt: skip


def fits(value: Any, form: Form) -> bool:
    """Return whether a value has a form."""
    if isinstance(form, tuple):
        return any(fits(value, each) for each in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(each, form[0]) for each in value)
    if form is None:
        return value is None
    if not isinstance(form, dict):
        return isinstance(value, form)
    if not isinstance(value, dict):
        return False
    if str in form:
        return all(isinstance(key, str) and fits(each, form[str]) for key, each in value.items())
    return all(fits(value.get(name), of) for name, of in form.items())


def misfit(content: dict[str, Any], form: Form) -> str:
    """Describe the first entry that does not fit its form or is an empty list; "" if all do."""
    for name, of in (dict.fromkeys(content, form[str]) if str in form else form).items():
        if not fits(content.get(name), of) or content.get(name) == []:
            return f"{name} is {content.get(name)!r}"[:200]
    return ""
