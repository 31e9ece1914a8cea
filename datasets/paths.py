"""The default folders of data sets and caches. Nothing here imports torch."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Return the folder of decoded copies: ``$MAML_CACHE``, else ``~/.cache/maml``."""
    return Path(os.environ.get("MAML_CACHE") or Path.home() / ".cache" / "maml").expanduser()


def default_data_root() -> Path:
    """Return the default folder of data sets: ``$MAML_DATA``, else ``~/.cache/maml``; absolute."""
    root = Path(os.environ.get("MAML_DATA") or Path.home() / ".cache" / "maml")
    return root.expanduser().absolute()
