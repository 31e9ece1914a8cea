"""How far a long piece of work is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

FIRST = 20.0
"""Seconds after which an iteration is long; the next line comes after twice as many, and so on."""


PLAIN = 15.0
"""Seconds between two lines where there is no terminal."""

RECENT = 30.0
"""Seconds whose rate is shown, and of whose rate the time left is reckoned."""


def bar(total: int, what: str, unit: str, *, speaks: bool, **options: Any) -> tqdm:
    """Return a bar with the time left; without a terminal, one that prints plain lines.

    Args:
        total: How much there is to do, in ``unit``s.
        what: What is done.
        unit: Of what.
        speaks: False: nothing is shown.
        options: tqdm's own.
    """
    if sys.stderr.isatty():
        return _Bar(
            total=total, desc=what, unit=unit, disable=not speaks, mininterval=0.5, **options
        )
    # With more than one iteration between two looks at the clock, tqdm has a thread print as well.
    return _Lines(
        total=total, desc=what, unit=unit, disable=not speaks, mininterval=PLAIN, miniters=1,
        bar_format="{desc}: {n_fmt} of {total_fmt} {unit}, {rate_fmt}, {remaining} left{postfix}",
        **options,
    )  # fmt: skip


class _Bar(tqdm):
    """Shows the rate of what was done lately, and never that of the first part beside others.

    The first iteration compiles, and fills caches: in a short run it would be most of a mean.
    """

    def __init__(self, **options: Any) -> None:
        # Before anything is shown. When what was done; the first is where the bar began.
        self._points = deque([(time.monotonic(), options.get("initial", 0))], maxlen=1000)
        self._is_first = True
        super().__init__(**options)

    def update(self, n: float | None = 1) -> bool | None:
        """Count ``n`` more."""
        points, now = self._points, time.monotonic()
        points.append((now, points[-1][1] + (n or 0)))
        if len(points) > 2 and (self._is_first or points[1][0] < now - RECENT):
            self._is_first = False
            points.popleft()
        return super().update(n)

    @property
    def format_dict(self) -> dict[str, Any]:
        """What a line is made of."""
        (began, before), (now, done) = self._points[0], self._points[-1]
        rate = (done - before) / (now - began) if now > began else None
        return {**super().format_dict, "rate": rate}


class _Lines(_Bar):
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


class Patience:
    """Says of an iteration that takes long how far it is."""

    def __init__(self, done: Callable[[], tuple[int, int]], *, speaks: bool) -> None:
        """``done()``: how many tasks of this process's share are done, and how many it has."""
        self._done, self._speaks = done, speaks
        self._iteration, self._began = 0, time.monotonic()
        self._ended = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look on until the end of this context."""
        thread = threading.Thread(target=self._look_on, name="patience", daemon=True)
        if self._speaks:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()

    def begin(self, iteration: int) -> None:
        """Say that ``iteration``, counted from 1, begins now."""
        self._iteration, self._began = iteration, time.monotonic()

    def end(self) -> None:
        """Say that it is over."""
        self._iteration = 0

    def _look_on(self) -> None:
        iteration, patience = 0, FIRST
        while not self._ended.wait(FIRST / 10):
            if iteration != self._iteration:
                iteration, patience = self._iteration, FIRST
            took = time.monotonic() - self._began
            if iteration and took > patience:
                patience *= 2
                done, of = self._done()
                line = f"iteration {iteration} has taken {took:.0f} s so far"
                if of:
                    line += f"; {done} of this process's {of} tasks are done"
                if 0 < done < of:
                    line += f", the others take about {took / done * (of - done):.0f} s"
                print(line, file=sys.stderr, flush=True)
