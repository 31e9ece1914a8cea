"""Show the progress of long work: a bar on a terminal, and plain lines elsewhere."""

import io
import sys
from typing import Any

from tqdm import tqdm

PLAIN = 15.0
"""Seconds between two lines where there is no terminal."""


def bar(total: int, what: str, unit: str, *, speaks: bool, **options: Any) -> tqdm:
    """Return tqdm's bar, shown if this process ``speaks``; without a terminal, as plain lines."""
    options |= {"total": total, "desc": what, "unit": unit, "disable": not speaks}
    if sys.stderr.isatty():
        return tqdm(mininterval=0.5, **options)
    # If miniters is above 1, tqdm's monitor thread prints as well. If delay is 0, tqdm prints a
    # line at once, although nothing is done yet.
    return tqdm(
        file=_Lines(), position=0, mininterval=PLAIN, miniters=1, delay=1e-9,
        bar_format="{desc}: {n_fmt} of {total_fmt} {unit}, {rate_fmt}, {remaining} left{postfix}",
        **options,
    )  # fmt: skip


class _Lines(io.TextIOBase):
    """Standard error for files and pipes: writes whole lines without carriage returns."""

    def write(self, text: str) -> int:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)
        return len(text)
