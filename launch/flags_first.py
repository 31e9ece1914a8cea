"""Check the flags of a command before its environment is made.

    python -m launch.flags_first launch.workers PRESET [--flag value …]

It runs in any Python of 3.11 or later, with no package installed. It exits with 2 after the line
that says what is wrong, with 3 after the help, and with 0 where nothing is wrong, or nobody can say
yet: a component of one's own, or one that a file names, may import anything.
"""

from __future__ import annotations

import importlib
import sys

from maml.errors import UserError
from maml.processes.program import run_program


def main(arguments: list[str]) -> int:
    """Let ``MODULE.read`` look at the flags; return the exit code."""
    module, *flags = arguments
    if any(":" in word or word == "--trust" for word in flags):
        return 0
    try:
        importlib.import_module(module).read(flags)
    except UserError:
        raise
    except SystemExit as ended:
        return 2 if ended.code else 3
    except Exception:  # what is missing here is not the user's mistake
        return 0
    return 0


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
