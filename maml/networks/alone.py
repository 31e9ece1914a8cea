"""One thread at a time calls a network: a call swaps its tensors in place, and may add hooks."""

import threading
import weakref
from contextlib import AbstractContextManager

from torch import nn

_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def alone_with(network: nn.Module) -> AbstractContextManager[bool]:
    """Return a context in which no other thread calls ``network``; it may be entered again.

    In it the network's tensors are its own; while another thread calls it, they are not.
    """
    with _MAKING:
        return _LOCKS.setdefault(network, threading.RLock())
