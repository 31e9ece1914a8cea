"""``python -m launch.check_record DIR``: whether a record's model scores what the record says."""

import sys

from maml.processes.program import run_program
from maml.studies.check_record import main

if __name__ == "__main__":
    run_program(main, sys.argv[1:])
