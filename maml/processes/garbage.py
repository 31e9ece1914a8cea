"""Garbage collection, kept away from what stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Exempt what exists before the loop from garbage collection.

    Modules and data sets are a million objects, which stay; to walk through them takes a tenth of
    a second, and every process that is waited for does it at another time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
