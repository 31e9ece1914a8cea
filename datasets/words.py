"""Words of messages."""


def counted(n: int, one: str, many: str | None = None) -> str:
    """Return a count and its noun: ``1 task``, ``2 tasks``; ``many`` is an irregular plural."""
    return f"{n} {one}" if n == 1 else f"{n} {many or one + 's'}"
