"""``python -m maml.evaluate RUN_DIR``: how good a run's checkpoints are.

    python -m maml.evaluate runs/maml-omniglot-5way-1shot-… --split test --tasks 600
    python -m maml.evaluate runs/20w5s --watch --split validation

It appends to the run directory's ``evaluations.jsonl``; with ``--watch``, a row for every
checkpoint as training makes them. A record stays as it is.
"""

import argparse
import contextlib
import copy
import errno
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets.components import is_theirs
from maml.config import Config, checks, registry
from maml.config.fields import with_values
from maml.config.parser import Parser, add_here, add_iteration, at_least, positive
from maml.errors import UserError
from maml.evaluation.best import RECORDED, content_of, load_best
from maml.evaluation.scores import check_headline, evaluate, no_answers, summary, there_are
from maml.processes.program import run_program
from maml.run import checkpoint, directory, files
from maml.run.provenance import warn_of_edits
from maml.strategies.local import alone

ASKED: dict[str, tuple[str, Any, str]] = {
    "steps": ("eval_inner_steps", at_least(0), "inner steps on the support set"),
    "ways": ("ways", at_least(1), "classes a task, for a learner without parameters of a class"),
    "shots": ("shots", at_least(1), "support examples per class"),
    "queries": ("eval_queries", at_least(1), "query examples per class"),
    "data": ("data", str, "another data set, of images of the same shape"),
    "threads": ("threads", at_least(1), "computing threads of this process"),
}
"""What may be asked otherwise than the run's own: flag, field, type, help."""

SETTLE = 90.0
"""Seconds in which a killed training may start again, and a shared folder show its last file."""


def main(arguments: list[str]) -> int:
    """Evaluate the model that a run tests, or watch the run; return the exit code."""
    options = _parse(arguments)
    evaluator = RunEvaluator(options)
    if options.watch:
        return Watch(evaluator).run()
    config = evaluator.config_now()
    transductive, together = evaluator.transductive, []
    saved = content_of(options.run_dir, options.iteration, transductive=transductive)
    if options.ensemble is not None:
        together = load_best(options.run_dir, options.ensemble, transductive=transductive)
    evaluator.build(config)
    evaluator.evaluate(saved, together)
    if not evaluator.of_record:
        _say(f"written to {evaluator.rows}")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m maml.evaluate",
        description="Evaluate a checkpoint of a run directory, or the model of a record.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--split", choices=("train", "validation", "test"), default="test")
    text = "tasks to evaluate (default: 600)"
    parser.add_argument("--tasks", type=at_least(1), default=600, help=text)
    text = "headline: normalise each query by the support set's statistics alone"
    parser.add_argument("--non-transductive", action="store_true", help=text)
    add_iteration(parser)
    text = "beside it the mean of the outputs of the K best checkpoints (train with --keep-best K)"
    parser.add_argument("--ensemble", metavar="K", type=at_least(2), help=text)
    for name, (_, kind, what) in ASKED.items():
        parser.add_argument(f"--{name}", type=kind, help=f"{what} (default: as in the run)")
    add_here(parser)
    text = "evaluate every checkpoint until the training is over; may be started before, and again"
    parser.add_argument("--watch", action="store_true", help=text)
    text = "--watch: seconds between looks (default: 5)"
    parser.add_argument("--poll", type=positive, default=5.0, help=text)
    text = "--watch: seconds without a change in RUN_DIR after which to give up (default: 3600)"
    parser.add_argument("--patience", type=positive, default=3600.0, help=text)
    options = parser.parse_args(arguments)
    for name in ("iteration", "ensemble"):
        if options.watch and getattr(options, name) is not None:
            raise UserError(f"--{name}: --watch evaluates every checkpoint")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("python -m maml.evaluate runs in one process: start it without torchrun")
    return options


class RunEvaluator:
    """Evaluates checkpoints of one run as the command line asks, all with the same worker."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows = options.run_dir / "evaluations.jsonl"
        self.of_record = (options.run_dir / RECORDED).is_file()
        if self.of_record and options.watch:
            raise UserError(f"--watch: {options.run_dir} is a record; its training is over")
        if self.rows.is_dir():  # not after an evaluation that takes an hour
            raise UserError(f"{self.rows}: is a folder")
        self.config: Config | None = None
        # Once, not with every checkpoint that is watched.
        self._warned: set[str] = set()

    def config_now(self) -> Config:
        """Return the run's configuration, with what is otherwise here."""
        options = self.options
        self._of_run = config = directory.config_here(
            options.run_dir, options.data_root, options.device, trust=options.trust
        )
        asked = {of[0]: getattr(options, name) for name, of in ASKED.items()}
        its_own = config.data == "folder" or is_theirs(config.data)
        if its_own and options.data not in (None, config.data) and options.data_root is None:
            # Its root is where a user's own images are, and no other data set.
            asked["data_root"] = Config().data_root
        config = with_values(config, **{n: v for n, v in asked.items() if v is not None})
        checks.check(config)
        if options.steps is not None and not registry.learner(config.learner).adapts_at_test:
            raise UserError(
                f"--steps {options.steps}: --learner {config.learner} takes no inner step"
            )
        # Which of the two accuracies is the headline, and chooses checkpoints.
        self.transductive = config.transductive and not options.non_transductive
        return config

    def build(self, config: Config) -> None:
        """Build the worker and open its episodes."""
        self.strategy, self.config = alone(config), config
        worker, options = self.strategy.worker, self.options
        if not worker.learner.any_ways and options.ways not in (None, self._of_run.ways):
            raise UserError(
                f"--ways {config.ways}: the parameters of --learner {config.learner} tell "
                f"{self._of_run.ways} classes apart"
            )
        _say(check_headline(worker, options.split, self.transductive, "--non-transductive"))
        asked = ("data", "ways", "shots", "eval_queries", "eval_inner_steps")
        self._question = {
            "transductive": self.transductive,
            "split": options.split,
            "tasks": there_are(options.tasks, worker, options.split),
            **{name: getattr(config, name) for name in asked},
        }

    def prepare(self) -> bool:
        """Build the worker when there is a configuration, and anew when it is another one."""
        try:
            config = self.config_now()
        except UserError as error:
            cause = error.__cause__
            # Not there yet; or replaced while it was read, over NFS.
            if isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ESTALE):
                return self.config is not None
            raise
        # A training that continues may be given other queries or inner steps to evaluate with.
        if config != self.config:
            self.build(config)
        return True

    def evaluated(self) -> set[int]:
        """Return the iterations that have a row for the same question."""
        # No more is needed: a training that goes back over one makes the same parameters again.
        rows = files.read_rows(self.rows, mended=True)
        return {row["iteration"] for row in rows if self._question.items() <= row.items()}

    def evaluate(self, saved: dict[str, Any], together: Sequence[dict[str, Any]] = ()) -> None:
        """Evaluate a checkpoint, and an ensemble ``together``; append the row and print it."""
        options, question = self.options, self._question
        self._check([saved, *together])
        row = {"iteration": saved["iteration"], **question}
        asked = [("", f"iteration {saved['iteration']}", saved["model"])]
        if together:
            row["ensemble"] = [one["iteration"] for one in together]
            who = f"ensemble of iterations {', '.join(map(str, row['ensemble']))}"
            asked += [("ensemble_", who, [one["model"] for one in together])]
        for prefix, who, models in asked:
            # A line that goes on for hours is for terminals.
            found = evaluate(
                self.strategy, models, options.split, options.tasks,
                progress=sys.stderr.isatty() or not options.watch,
            )  # fmt: skip
            row |= {prefix + name: found[name] for name in found if name not in question}
            # Before it is written: where that fails, it is not lost.
            print(f"{who}: {summary(found, self.strategy.config, self.transductive)}", flush=True)
            _say(no_answers(found))
        row["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        if not self.of_record:
            # Where a full disk has cut the last row short, this one begins a line of its own.
            before = self.rows.read_bytes() if self.rows.is_file() else b""
            mend = "\n" if before and not before.endswith(b"\n") else ""
            files.append_line(self.rows, mend + json.dumps(row))

    def _check(self, contents: Sequence[dict[str, Any]]) -> None:
        """Refuse checkpoints, the first of which is the run's, that do not fit what is asked."""
        options, learner = self.options, self.strategy.worker.learner
        for one in contents:
            what = f"{options.run_dir}, after {one['iteration']}"
            checkpoint.check_model(one, learner.meta_parameters(), what)
            warn_of_edits(self.strategy.config, one, self._warned)
        if contents[0].get("division") is not None and options.data is None:
            # As the run opens it: what is asked of the tasks here is not asked of those.
            learner = copy.copy(learner)
            learner.config = self._of_run
            division = learner.open_tasks("train").division
            checkpoint.check_division(contents[0], division, options.run_dir)


class Watch:
    """Evaluates every numbered checkpoint of a run, each once, until its training is over.

    Nothing but the run directory connects the two, on a shared folder, too: training renames
    finished files into place and never looks whether anybody reads them. So there are no locks, and
    nothing is read half-written. The directory need not exist yet.
    """

    def __init__(self, evaluator: RunEvaluator) -> None:
        self._evaluator, self._run_dir = evaluator, evaluator.options.run_dir
        self._done, self._damaged = set[int](), set[int]()

    def run(self) -> int:
        """Look every ``--poll`` seconds; give up after ``--patience`` seconds without a change.

        The exit code is 0 when training has finished, or was stopped, and its last checkpoint is
        evaluated; else 1, after a line that says why.
        """
        run_dir, options = self._run_dir, self._evaluator.options
        _say(f"watching {run_dir}")
        before, since = None, time.monotonic()
        while True:
            # The status before the checkpoints: what was saved before an end is seen after it.
            status = directory.read_status(run_dir) or {"state": "unknown", "iteration": -1}
            state, iteration = status["state"], status["iteration"]
            if self._evaluate_next():
                before = None  # there is more to see by now
                continue
            ended = state in ("finished", "stopped")
            if ended and iteration in self._done:
                print(f"training has {state} after iteration {iteration}", flush=True)
                return 0
            if state == "failed" or (ended and iteration in self._damaged):
                why = ", but its last checkpoint is damaged" if ended else ""
                _say(f"error: {run_dir}: training has {state} after iteration {iteration}{why}")
                return 1
            look = self._look()
            if look != before:
                before, since = look, time.monotonic()
            patience = options.patience
            limit = patience if state in ("training", "unknown") else min(SETTLE, patience)
            if time.monotonic() - since > limit:
                why = {
                    "unknown": "no training has begun",
                    "training": f"training is at iteration {iteration}",
                    "lost": f"training was lost after iteration {iteration}",
                }.get(state, f"training has {state}, but checkpoint {iteration} is not there")
                _say(f"error: {run_dir}: nothing has changed for {limit:g} s (--patience); {why}")
                return 1
            time.sleep(min(options.poll, limit))

    def _evaluate_next(self) -> bool:
        """Evaluate the oldest checkpoint that is not done; return whether there was one."""
        if not self._evaluator.prepare():
            return False
        # Read anew each time: rows of an earlier watcher, or of another one.
        self._done |= self._evaluator.evaluated()
        for iteration, path in checkpoint.numbered_checkpoints(self._run_dir).items():
            if iteration in self._done | self._damaged:
                continue
            try:
                saved = checkpoint.load(path)
            except UserError as error:
                # Training keeps only the newest few: one that is gone by now is not damaged.
                if path.exists():
                    self._damaged.add(iteration)
                    _say(f"{error}; left out")
                continue
            self._evaluator.evaluate(saved)
            return True
        return False

    def _look(self) -> set[tuple[str, int]]:
        """Return what differs when training has changed something: half a file counts, too."""
        names = ("config.yaml", "metrics.jsonl", "status.json", "checkpoints/*")
        found = set()
        for path in itertools.chain.from_iterable(map(self._run_dir.glob, names)):
            with contextlib.suppress(OSError):  # gone
                found.add((path.name, path.stat().st_mtime_ns))
        return found


def _say(line: str) -> None:
    if line:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
