"""Check every array of the cache against its digest: ``python -m datasets.check``.

One line a file. A damaged one stays where it is: whoever needs it next builds it anew. The exit
code is 1 if there is one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from datasets import cache
from datasets.errors import DataError
from datasets.paths import cache_root


def main(folder: Path) -> int:
    """Check the files under ``folder``; return the exit code."""
    damaged = 0
    for path in sorted(folder.rglob("*.npy")):
        began = time.monotonic()
        try:
            size = cache.check(path).size
        except DataError as error:
            damaged += 1
            print(error, flush=True)
        else:
            took = time.monotonic() - began
            print(f"{path}: whole, {size / 1e6:.1f} MB in {took:.2f} s", flush=True)
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main(cache_root()))
