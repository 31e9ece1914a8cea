"""``python -m launch.record RUN_DIR``: keep what a table shows of a finished run."""

import sys

from maml.processes.program import run_program
from maml.studies.record import main

if __name__ == "__main__":
    run_program(main, sys.argv[1:])
