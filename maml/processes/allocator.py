"""Memory allocation settings, applied at the start of a process, before torch is imported.

Training drops megabytes thousands of times a second. By default glibc returns such blocks to the
kernel and pages the next ones in again, zeroed: up to a third of the time. Here freed memory stays
with the process, and large blocks get huge pages where the system grants them. Threads share as
many pools as there are cores: calls over RPC come in on many, and each would page in its own.

glibc's own variables and torch's ``THP_MEM_ALLOC_ENABLE`` override; ``MAML_ALLOCATOR=off`` leaves
all alone.
"""

import ctypes
import os
import sys

# malloc.h; glibc takes no larger threshold than this for mmap.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_BYTES = 32 << 20
_TRIM_BYTES = 2**31 - 1


def tune() -> bool:
    """Apply the settings; return whether the C library took them (glibc only)."""
    if os.environ.get("MAML_ALLOCATOR") == "off" or not sys.platform.startswith("linux"):
        return False
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    taken = True
    for variable, parameter, value in (
        ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, _MMAP_BYTES),
        ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, _TRIM_BYTES),
        ("MALLOC_ARENA_MAX", _M_ARENA_MAX, os.cpu_count() or 1),
    ):
        if variable not in os.environ:
            taken = bool(mallopt(parameter, value)) and taken
    return taken
