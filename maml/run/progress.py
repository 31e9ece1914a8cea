"""How far a long piece of work is: a bar on a terminal, a line now and then elsewhere."""

import sys
from typing import Any

from tqdm import tqdm

PLAIN = 15.0
"""Seconds between two lines where there is no terminal."""


def bar(total: int, what: str, unit: str, *, speaks: bool, **options: Any) -> tqdm:
    """Return a bar with the time left of ``total`` ``unit``s; without a terminal, plain lines.

    ``options`` are tqdm's own; nothing is shown unless this process ``speaks``.
    """
    options |= {"total": total, "desc": what, "unit": unit, "disable": not speaks}
    if sys.stderr.isatty():
        return tqdm(mininterval=0.5, **options)
    # With more than one iteration between two looks at the clock, tqdm has a thread print as well.
    return _Lines(
        mininterval=PLAIN, miniters=1,
        bar_format="{desc}: {n_fmt} of {total_fmt} {unit}, {rate_fmt}, {remaining} left{postfix}",
        **options,
    )  # fmt: skip


class _Lines(tqdm):
    """A bar for files and pipes: whole lines, and no carriage return."""

    def __init__(self, **options: Any) -> None:
        # Before anything is shown.
        self._shown = options.get("initial", 0)
        super().__init__(**options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Print a line, once something is done."""
        if self.n > self._shown:
            self._shown = self.n
            print(self, file=self.fp, flush=True)

    def clear(self, nolock: bool = False) -> None:
        """Leave what is printed as it is."""

    def close(self) -> None:
        """Print the last line, if it is to stay."""
        if self.disable:
            return
        self.disable = True
        self._decr_instances(self)  # type: ignore[attr-defined]
        if self.leave:
            self.display()
