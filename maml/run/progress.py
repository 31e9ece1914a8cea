"""How far a long piece of work is: a bar on a terminal, a line now and then elsewhere."""

import sys
from typing import Any

from tqdm import tqdm

PLAIN = 15.0
"""Seconds between two lines where there is no terminal."""


def bar(total: int, what: str, unit: str, *, speaks: bool, **options: Any) -> tqdm:
    """Return tqdm's bar, which is shown if this process ``speaks``; no terminal: plain lines."""
    options |= {"total": total, "desc": what, "unit": unit, "disable": not speaks}
    if sys.stderr.isatty():
        return tqdm(mininterval=0.5, **options)
    # With more than one iteration between two looks at the clock, tqdm has a thread print as well.
    # Without a delay it shows that nothing is done yet.
    return tqdm(
        file=_Lines(), position=0, mininterval=PLAIN, miniters=1, delay=1e-9,
        bar_format="{desc}: {n_fmt} of {total_fmt} {unit}, {rate_fmt}, {remaining} left{postfix}",
        **options,
    )  # fmt: skip


class _Lines:
    """Standard error, for files and pipes: whole lines, and no carriage return."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Each line is flushed."""
