"""``python -m launch.compare A B …``: is one better than the other, and how sure is that."""

import sys

from maml.processes.program import run_program
from maml.studies.compare import main

if __name__ == "__main__":
    run_program(main, sys.argv[1:])
