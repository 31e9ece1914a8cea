"""``python -m launch.table``: the published tables beside ours, from the records alone."""

import sys

from maml.processes.program import run_program
from maml.studies.table import main

if __name__ == "__main__":
    run_program(main, sys.argv[1:])
