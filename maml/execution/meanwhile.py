"""Changes of torch and of warnings that last for a call of ours, and not longer.

A process has these settings once. So they change when the first thread begins such a call, and
change back when the last thread ends it. A replaced function is torch's own to all other threads.
"""

import contextlib
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any, Self


class Meanwhile(contextlib.ContextDecorator):
    """A re-entrant context for many threads: the first one to enter begins, the last one ends."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def begin(self) -> None:
        """Change what lasts while any thread is inside."""

    def end(self) -> None:
        """Change it back."""

    def __enter__(self) -> Self:
        with self._lock:
            if not self._inside:
                self.begin()
            self._inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self.end()


class Replaced(Meanwhile):
    """Within this context, a module's function is another one for the threads inside."""

    def __init__(self, module: Any, name: str, by: Callable[..., Any]) -> None:
        """``by`` takes the function that it replaces, and then what this function takes."""
        super().__init__()
        self._module, self._name, self._by = module, name, by
        self._depth = threading.local()

    def begin(self) -> None:
        """Put a function there that asks which thread calls it."""
        own = self._own = getattr(self._module, self._name)

        def function(*given: Any, **named: Any) -> Any:
            if getattr(self._depth, "here", 0):
                return self._by(own, *given, **named)
            return own(*given, **named)

        setattr(self._module, self._name, function)

    def end(self) -> None:
        """Put the module's own function back."""
        setattr(self._module, self._name, self._own)

    def __enter__(self) -> Self:
        super().__enter__()
        self._depth.here = getattr(self._depth, "here", 0) + 1
        return self

    def __exit__(self, *given: object) -> None:
        self._depth.here -= 1
        super().__exit__(*given)


class _Quiet(Meanwhile):
    """A context without torch's warning that ``torch.func.vmap`` computes an operation slowly.

    Not `warnings.catch_warnings`, which puts back the filters of its begin, and so undoes what
    another thread has changed since. It also lets each warning that was shown once appear again.
    """

    _filter = "ignore", re.compile("There is a performance drop"), UserWarning, None, 0

    def begin(self) -> None:
        """Put a filter before the user's."""
        filters: Any = warnings.filters
        filters.insert(0, self._filter)
        self._filters = filters

    def end(self) -> None:
        """Take it away, also from a copy of the list that another thread has put there."""
        filters: Any = warnings.filters
        for each in (self._filters, filters):
            if self._filter in each:
                each.remove(self._filter)


QUIET = _Quiet()
