"""``maml PROGRAM …``, or ``python -m maml PROGRAM …``: all programs under one name."""

import importlib
import sys

from datasets.errors import needs
from maml.errors import UserError
from maml.processes.program import run_program

PROGRAMS = {
    "train": ("train_maml", "train a learner: PRESET [--flag value …]"),
    "evaluate": ("maml.evaluate", "evaluate a run's checkpoints, also with other settings"),
    "predict": ("maml.predict", "adapt to a folder of images, and name others"),
    "plots": ("maml.plots.__main__", "draw runs"),
    "replay": ("maml.replay", "compute the tasks of a step that was not finite, one by one"),
    "sweep": ("maml.studies.sweep", "run the trials of a sweep"),
    "compare": ("maml.studies.compare", "two runs, paired over tasks and seeds"),
    "record": ("maml.studies.record", "keep a run for a table"),
    "check": ("maml.studies.recorded", "compute a record's accuracies again"),
    "table": ("maml.studies.table", "the published table beside ours"),
}
"""The module of each program, and its line in the help text."""


def main(arguments: list[str]) -> int:
    """Run the program that the first argument names, with the arguments after it."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: maml PROGRAM …   (maml PROGRAM --help: its arguments)\n")
        for name, (_, does) in PROGRAMS.items():
            print(f"  {name:9} {does}")
        return 0
    if arguments[0] not in PROGRAMS:
        raise UserError(f"maml {arguments[0]}: no such program; {', '.join(PROGRAMS)}")
    extra = "sweeps" if arguments[0] == "sweep" else "train"
    with needs(extra, f"maml {arguments[0]}"):
        found = importlib.import_module(PROGRAMS[arguments[0]][0])
    code: int = found.main(arguments[1:])
    return code


def entry(*program: str) -> None:
    """Run a program on the command line's arguments, after the words ``program`` if given."""
    run_program(main, [*program, *sys.argv[1:]])


if __name__ == "__main__":
    entry()
