"""Words of messages."""


def counted(n: int, one: str, many: str | None = None) -> str:
    """Return a count and its noun: ``1 task``, ``2 tasks``; ``many`` is an irregular plural."""
    return f"{n} {one}" if n == 1 else f"{n} {many or one + 's'}"


def reason(error: BaseException) -> str:
    """Return an exception's message in one line; its type if it has none."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
