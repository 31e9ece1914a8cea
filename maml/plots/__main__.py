"""``python -m maml.plots RUN_DIR…``: pictures of runs, as PNG and PDF.

    python -m maml.plots runs/glyphs                     # into runs/glyphs/plots
    python -m maml.plots runs/maml runs/anil --names MAML ANIL --folder figures
    python -m maml.plots runs/sweeps/inner-rate          # all trials of a sweep

Runs that differ only in their seed are one method: its plot shows the mean and each run. Without
``--trust``, pictures of a model that needs a user's own code are left out.
"""

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets.words import counted
from maml.config import registry
from maml.config.parser import Parser, add_trust, at_least
from maml.errors import UserError
from maml.library.model import Model, load
from maml.plots import curves, style
from maml.plots import tasks as of_tasks
from maml.run import checkpoint, reading
from maml.run.files import make_folder, refuse_links
from maml.run.reading import Run


def main(arguments: list[str]) -> int:
    """Draw; return the exit code."""
    parser = Parser(prog="python -m maml.plots", description=__doc__)
    text = "run directories, or folders of them"
    parser.add_argument("paths", metavar="RUN_DIR", nargs="+", type=Path, help=text)
    text = "a label for each run, or each method, in order"
    parser.add_argument("--names", metavar="NAME", nargs="+", help=text)
    parser.add_argument("--folder", type=Path, help="where the pictures go")
    text = "test tasks for each point (default: 100)"
    parser.add_argument("--tasks", type=at_least(2), default=100, help=text)
    add_trust(parser, "a run's config.yaml")
    options = parser.parse_args(arguments)
    runs = reading.find(options.paths)
    methods = named(options.names, runs)
    folder = options.folder
    if folder is None:
        several = Path("runs", f"plots-{time.strftime('%Y%m%d-%H%M%S')}")
        folder = options.paths[0] / "plots" if len(options.paths) == 1 else several
        refuse_links(folder.parent, folder.name)
    make_folder(folder, "--folder")
    count = 0
    for name, drawn in pictures(methods, options.tasks, trust=options.trust):
        # Not every run has something for every picture.
        if drawn is not None:
            style.save(drawn, folder / name)
            print(f"drawn: {name}", file=sys.stderr, flush=True)
            count += 1
    many, of = counted(count, "picture"), counted(len(runs), "run")
    print(f"{many} of {of}, each as PNG and PDF: {folder}")
    return 0


def named(names: list[str] | None, runs: list[Run]) -> dict[str, list[Run]]:
    """Return the runs by method; ``names`` has one label for each method, or for each run."""
    methods = reading.methods(runs)
    if names is None:
        return methods
    if len(set(names)) < len(names):
        raise UserError("--names: one is given twice")
    if hidden := [name for name in names if name.startswith("_") or not name.strip()]:
        raise UserError(f"--names {hidden[0]!r}: a label is not empty, and begins with no _")
    for labelled in (list(methods.values()), [[run] for run in runs]):
        if len(names) == len(labelled):
            return dict(zip(names, labelled, strict=True))
    of = f"{counted(len(runs), 'run')} of {counted(len(methods), 'method')}: {', '.join(methods)}"
    raise UserError(f"--names: {counted(len(names), 'name')} for {of}")


def pictures(
    methods: dict[str, list[Run]], tasks: int, *, trust: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the name and the figure of each picture; None where a run has nothing for it."""
    yield "curves", curves.learning_curves(methods)
    trained = _trained(methods, trust=trust)
    for number, (name, models) in enumerate(trained.items(), 1):
        which = f"-{number}-" + re.sub(r"[^\w.=-]+", "_", name)[:40].strip("_")
        yield "panel" + which * (len(trained) > 1), of_tasks.panel(models[0])
    adapting = {
        name: models
        for name, models in trained.items()
        if registry.learner(models[0].config.learner).adapts_at_test
    }
    if adapting:
        yield "steps", curves.by_step(adapting, tasks)


def _trained(methods: dict[str, list[Run]], *, trust: bool) -> dict[str, list[Model]]:
    """Return the models of the runs by method; leave out runs whose model cannot be loaded."""
    models: dict[str, list[Model]] = {}
    for name, run in ((name, run) for name, each in methods.items() for run in each):
        if not checkpoint.last_checkpoint(run.path).exists():
            continue
        try:
            model = load(run.path, trust=trust)
        except UserError as error:
            print(f"left out: pictures of the model: {error}", file=sys.stderr, flush=True)
        else:
            models.setdefault(name, []).append(model)
    return models


if __name__ == "__main__":
    from maml.processes.program import run_program

    run_program(main, sys.argv[1:])
