"""Words of messages."""


def counted(n: int, one: str, many: str | None = None) -> str:
    """How many of what: ``1 task``, ``2 tasks``; ``many`` where that is not ``one`` with an s."""
    return f"{n} {one}" if n == 1 else f"{n} {many or one + 's'}"
