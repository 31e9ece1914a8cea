"""``python -m launch.sweep FILE``: run the trials of a sweep, without a server."""

import sys

from maml.processes.program import run_program
from maml.studies.sweep import main

if __name__ == "__main__":
    run_program(main, sys.argv[1:])
