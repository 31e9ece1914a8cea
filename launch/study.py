"""``python -m launch.study SWEEP_FOLDER``: keep what a sweep has found."""

import sys

from maml.processes.program import run_program
from maml.studies.study import main

if __name__ == "__main__":
    run_program(main, sys.argv[1:])
