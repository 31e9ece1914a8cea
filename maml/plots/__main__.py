"""``python -m maml.plots RUN_DIR…``: pictures of runs, as PNG and PDF.

    python -m maml.plots runs/glyphs                     # into runs/glyphs/plots
    python -m maml.plots runs/maml-* runs/anil-* --folder figures
    python -m maml.plots runs/sweeps/inner-rate          # all trials of a sweep

Runs that differ in their seed alone are one method, drawn as their mean with an interval. What is
drawn with a model that needs code of a user's own is left out without ``--trust``.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets.trust import refusal
from datasets.words import counted
from maml.config import registry
from maml.config.parser import Parser, add_trust, whole_number
from maml.config.saved import believed
from maml.errors import UserError
from maml.plots import comparing, curves, runs, style
from maml.plots.runs import Run
from maml.run import checkpoint
from maml.run.files import make_folder
from maml.scores import headline


def main(arguments: list[str]) -> int:
    """Draw; return the exit code."""
    parser = Parser(prog="python -m maml.plots", description="Draw runs.")
    parser.add_argument(
        "paths", metavar="RUN_DIR", nargs="+", type=Path, help="run directories, or folders of them"
    )
    parser.add_argument("--folder", type=Path, help="where the pictures go")
    parser.add_argument(
        "--tasks", type=whole_number, default=100, help="test tasks for each point (default: 100)"
    )
    parser.add_argument(
        "--task", type=whole_number, default=0, help="the test task that is drawn (default: 0)"
    )
    add_trust(parser, "a run's config.yaml")
    options = parser.parse_args(arguments)
    if options.tasks < 2 or options.task < 0:
        raise UserError("--tasks must be at least 2, and --task at least 0")
    found = runs.find(options.paths)
    methods = runs.methods(found)
    folder = options.folder
    if folder is None:
        several = Path("runs", f"plots-{time.strftime('%Y%m%d-%H%M%S')}")
        folder = options.paths[0] / "plots" if len(options.paths) == 1 else several
    make_folder(folder, "--folder")
    count = _draw(methods, folder, options.tasks, options.task, trust=options.trust)
    pictures, of = counted(count, "picture"), counted(len(found), "run")
    print(f"{pictures} of {of}, each as PNG and PDF: {folder}")
    return 0


def _draw(
    methods: dict[str, list[Run]], folder: Path, tasks: int, task: int, *, trust: bool
) -> int:
    """Draw all there is to draw; return how many pictures."""
    every = [run for of_method in methods.values() for run in of_method]
    metric = runs.metric_of(every)
    pictures: dict[str, Callable[[], Any]] = {
        "curves": lambda: curves.learning_curves(methods, metric)
    }
    tested = {
        n: [r for r in each if r.result.get("ci95") is not None] for n, each in methods.items()
    }
    tested = {name: each for name, each in tested.items() if each}
    if len(tested) > 1:
        pictures["compared"] = lambda: comparing.means(_tested(tested), metric)
        names = runs.differing([run for each in tested.values() for run in each])
        flat = [run for each in tested.values() for run in each]
        points = [{name: getattr(run.config, name) for name in names} for run in flat]
        values = [float(run.result[_score(run)]) for run in flat]
        # Of a part of a grid a mean over the others would mix their effects up.
        whole = math.prod(len({point[name] for point in points}) for name in names)
        if names and whole == len(tested):
            pictures["effects"] = lambda: comparing.main_effects(
                points, values, names, f"test {metric}"
            )
    pictures |= _of_models(_trained(methods, trust=trust), tasks, task, trust=trust)
    count = 0
    for name, draw in pictures.items():
        drawn = draw()
        # Not every run has something for every picture.
        if drawn is not None:
            style.save(drawn, folder / name)
            print(f"drawn: {name}", file=sys.stderr, flush=True)
            count += 1
    return count


def _trained(methods: dict[str, list[Run]], *, trust: bool) -> dict[str, list[Run]]:
    """Return the runs that have a checkpoint, and whose code is trusted if they name some."""
    found: dict[str, list[Run]] = {}
    refused: list[str] = []
    for name, each in methods.items():
        for run in each:
            if not checkpoint.last_checkpoint(run.path).exists():
                continue
            config = believed(run.config) if trust else run.config
            why = next(filter(None, map(refusal, registry.theirs(config).values())), "")
            if why:
                refused.append(why)
            else:
                found.setdefault(name, []).append(replace(run, config=config))
    if refused:
        others = f" (and {counted(len(refused) - 1, 'other run')})" * (len(refused) > 1)
        print(f"left out: pictures of the model: {refused[0]}{others}", file=sys.stderr, flush=True)
    return found


def _of_models(
    methods: dict[str, list[Run]], tasks: int, task: int, *, trust: bool
) -> dict[str, Callable[[], Any]]:
    """Return what is drawn with trained models."""
    # Imported late: they bring torch.
    from maml.library.model import load
    from maml.plots import adaptation, filmstrip
    from maml.plots import tasks as of_tasks

    def trained(kind: str) -> dict[str, list[Run]]:
        found = {
            name: [r for r in each if registry.learner(r.config.learner).tasks == kind]
            for name, each in methods.items()
        }
        return {name: each for name, each in found.items() if each}

    def named(picture: str, name: str, among: Collection[str]) -> str:
        return picture if len(among) == 1 else f"{picture}-" + re.sub(r"[^\w.=-]+", "_", name)

    policies = trained("environments")
    strips: dict[str, Callable[[], Any]] = {
        named("filmstrip", name, policies): partial(filmstrip.of_run, each[0].path, trust=trust)
        for name, each in policies.items()
    }
    models = {
        name: [load(run.path, trust=trust) for run in each]
        for name, each in trained("episodes").items()
    }
    if not models:
        return strips
    pictures = strips
    adapting = {
        name: each
        for name, each in models.items()
        if registry.learner(each[0].config.learner).adapts_at_test
    }
    if adapting:
        pictures["steps"] = lambda: adaptation.by_step(adapting, tasks)
    for name, (model, *_) in models.items():
        pictures |= {
            named("panel", name, models): partial(of_tasks.panel, model, task),
            named("embedding", name, models): partial(of_tasks.embedding, model, task),
            named("adapted", name, models): partial(of_tasks.curve, model, task),
            named("rates", name, models): partial(adaptation.rates, model),
        }
    return pictures


def _score(run: Run) -> str:
    return headline([name for name, value in run.result.items() if value is not None])


def _tested(
    tested: dict[str, list[Run]],
) -> dict[str, tuple[float, comparing.Ends, comparing.Ends | None]]:
    """Return each method's test mean, its interval over tasks, and over seeds."""
    rows = {}
    for name, each in tested.items():
        values = [float(run.result[_score(run)]) for run in each]
        mean, half = curves.mean_and_spread(values)
        # Of independent runs: their half-widths add up in quadrature.
        tasks = sum(float(run.result["ci95"]) ** 2 for run in each) ** 0.5 / len(each)
        seeds = (mean - half, mean + half) if len(each) > 1 else None
        rows[name] = mean, (mean - tasks, mean + tasks), seeds
    return rows


if __name__ == "__main__":
    from maml.processes.program import run_program

    run_program(main, sys.argv[1:])
