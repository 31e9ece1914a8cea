"""``python -m maml.evaluate RUN_DIR``: evaluate a run's checkpoints.

    python -m maml.evaluate runs/maml-omniglot-5way-1shot-… --split test --tasks 600
    python -m maml.evaluate runs/20w5s --watch --split validation

The program appends a row to ``evaluations.jsonl`` in the run directory; with ``--watch``, a row for
every checkpoint, as soon as training saves it. In a record it writes nothing.
"""

import argparse
import contextlib
import copy
import errno
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maml.processes.program import run_program  # before torch

# isort: split
from maml.config import Config, checks, registry
from maml.config.fields import with_values
from maml.config.parser import Parser, add_here, add_iteration, at_least, positive
from maml.errors import UserError
from maml.evaluation.best import RECORDED, content_of, load_best
from maml.evaluation.scores import (
    check_headline,
    check_own_data,
    evaluate,
    no_answers,
    summary,
    there_are,
)
from maml.processes.streams import log_in
from maml.run import checkpoint, directory, files
from maml.run.provenance import warn_of_edits
from maml.strategies.local import alone

ASKED: dict[str, tuple[str, Any, str]] = {
    "steps": ("eval_inner_steps", at_least(0), "inner steps on the support set"),
    "ways": ("ways", at_least(1), "classes per task, for learners without parameters of a class"),
    "shots": ("shots", at_least(1), "support examples per class"),
    "queries": ("eval_queries", at_least(1), "query examples per class"),
    "threads": ("threads", at_least(1), "computing threads of this process"),
}
"""Settings that may differ from the run's own, by flag: field, type, help."""

SETTLE = 90.0
"""Seconds to wait after training ended: for a restart, or for its last file to appear."""


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
    parser = Parser(prog="python -m maml.evaluate", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--split", choices=("train", "validation", "test"), default="test")
    text = "tasks to evaluate (default: 600)"
    parser.add_argument("--tasks", type=at_least(1), default=600, help=text)
    text = "headline accuracy: normalise each query by the support set's statistics"
    parser.add_argument("--non-transductive", action="store_true", help=text)
    add_iteration(parser)
    text = "evaluate an ensemble, too: the mean output of the K best checkpoints (--keep-best K)"
    parser.add_argument("--ensemble", metavar="K", type=at_least(2), help=text)
    for name, (_, kind, what) in ASKED.items():
        parser.add_argument(f"--{name}", type=kind, help=f"{what} (default: as in the run)")
    add_here(parser)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    text = "evaluate every checkpoint until training ends; you may start it before the training"
    parser.add_argument("--watch", action="store_true", help=text)
    text = "--watch: seconds between looks (default: 5)"
    parser.add_argument("--poll", type=positive, default=5.0, help=text)
    text = "--watch: seconds without a change in RUN_DIR after which to give up (default: 3600)"
    parser.add_argument("--patience", type=positive, default=3600.0, help=text)
    options = parser.parse_args(arguments)
    if options.data:
        run = options.run_dir
        raise UserError(
            f"--data: test on other data in a new run: train_maml.py --config {run}/config.yaml "
            f"--init {run} --iterations 0 --data {options.data} --data-root PATH"
        )
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
        if not self.of_record:
            files.refuse_links(options.run_dir, self.rows.name)
            log_in(options.run_dir)
        # Fail now, not after an evaluation of an hour.
        if self.rows.is_dir():
            raise UserError(f"{self.rows}: is a folder")
        at = self.rows if self.rows.exists() else options.run_dir
        if at.exists() and not self.of_record and not os.access(at, os.W_OK):
            raise UserError(f"{self.rows}: cannot write; evaluate a copy of {options.run_dir}")
        self.config: Config | None = None
        # Warn once, not with every checkpoint that --watch evaluates.
        self._warned: set[str] = set()

    def config_now(self) -> Config:
        """Return the run's configuration, with the values of this machine and command line."""
        options = self.options
        self._of_run = config = directory.config_here(
            options.run_dir, options.data_root, options.device, trust=options.trust
        )
        asked = {of[0]: getattr(options, name) for name, of in ASKED.items()}
        config = with_values(config, **{n: v for n, v in asked.items() if v is not None})
        if options.steps is not None and not registry.learner(config.learner).adapts_at_test:
            raise UserError(
                f"--steps {options.steps}: --learner {config.learner} takes no inner step"
            )
        checks.check(config, self._of_run)  # refuses what has no effect, as --shots of a classifier
        # Selects the accuracy that is the headline and that chooses checkpoints.
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
        for line in check_own_data(worker, [options.split], trains=False):
            _say(line)
        asked = ("data", "ways", "shots", "eval_queries", "eval_inner_steps")
        self._question = {
            "transductive": self.transductive,
            "split": options.split,
            "tasks": there_are(options.tasks, worker, options.split),
            **{name: getattr(config, name) for name in asked},
        }
        if images := worker.evaluation(options.split).content():
            self._question["images"] = images

    def prepare(self) -> bool:
        """Build the worker for the run's configuration; return whether there is one yet."""
        try:
            config = self.config_now()
        except UserError as error:
            cause = error.__cause__
            # The file is not there yet, or was replaced during the read (NFS).
            if isinstance(cause, OSError) and cause.errno in (errno.ENOENT, errno.ESTALE):
                return self.config is not None
            raise
        # A training that continues may have other flags, such as --eval-queries.
        if config != self.config:
            self.build(config)
        return True

    def evaluated(self) -> set[int]:
        """Return the iterations that have a row with the same evaluation settings."""
        # The iteration is enough: a training that repeats it makes the same parameters again.
        rows = files.read_rows(self.rows, mended=True)
        return {row["iteration"] for row in rows if self._question.items() <= row.items()}

    def evaluate(self, saved: dict[str, Any], together: Sequence[dict[str, Any]] = ()) -> None:
        """Evaluate a checkpoint, and an ensemble ``together``; print the scores, append the row."""
        options, question = self.options, self._question
        self._check([saved, *together])
        row = {"iteration": saved["iteration"], **question}
        asked = [("", f"iteration {saved['iteration']}", saved["model"])]
        if together:
            row["ensemble"] = [one["iteration"] for one in together]
            who = f"ensemble of iterations {', '.join(map(str, row['ensemble']))}"
            asked += [("ensemble_", who, [one["model"] for one in together])]
        for prefix, who, models in asked:
            # With --watch, a progress bar runs for hours: show it only in a terminal.
            found = evaluate(
                self.strategy, models, options.split, options.tasks,
                progress=sys.stderr.isatty() or not options.watch,
            )  # fmt: skip
            row |= {prefix + name: found[name] for name in found if name not in question}
            # Print before the row is written, so that a failed write does not lose the result.
            print(f"{who}: {summary(found, self.strategy.config, self.transductive)}", flush=True)
            _say(no_answers(found))
        row["time"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        if not self.of_record:
            files.append_row(self.rows, row)

    def _check(self, contents: Sequence[dict[str, Any]]) -> None:
        """Refuse checkpoints of another network, or of other training classes than now."""
        options, learner = self.options, self.strategy.worker.learner
        for one in contents:
            what = f"{options.run_dir}, after {one['iteration']}"
            checkpoint.check_model(one, learner.meta_parameters(), what)
            warn_of_edits(self.strategy.config, one, self._warned)
        if contents[0].get("division") is not None:
            # Open the training split with the run's settings, not with those of this evaluation.
            learner = copy.copy(learner)
            learner.config = self._of_run
            division = learner.open_tasks("train").division
            checkpoint.check_division(contents[0], division, options.run_dir)


class Watch:
    """Evaluates every numbered checkpoint of a run, each once, until its training is over.

    The watcher and the training share only the run directory, which may be on a shared folder.
    Training renames finished files into place and does not depend on readers. So there are no
    locks, and the watcher reads no half-written file. The directory need not exist yet.
    """

    def __init__(self, evaluator: RunEvaluator) -> None:
        self._evaluator, self._run_dir = evaluator, evaluator.options.run_dir
        self._done, self._said = set[int](), set[str]()

    def run(self) -> int:
        """Look every ``--poll`` seconds; give up after ``--patience`` seconds without a change.

        The exit code is 0 when training has finished, or was stopped, and its last checkpoint is
        evaluated; else 1, after a line that says why.
        """
        run_dir, options = self._run_dir, self._evaluator.options
        _say(f"watching {run_dir}")
        before, since = None, time.monotonic()
        while True:
            # Read the status before the checkpoints, so that no checkpoint before an end is missed.
            status = directory.read_status(run_dir) or {"state": "unknown", "iteration": -1}
            state, iteration = status["state"], status["iteration"]
            if self._evaluate_next():
                before = None  # restart the patience: evaluating took time
                continue
            if state in ("finished", "stopped") and iteration in self._done:
                print(f"training has {state} after iteration {iteration}", flush=True)
                return 0
            if state == "failed":
                _say(f"error: {run_dir}: training has failed after iteration {iteration}")
                return 1
            look = self._look()
            if look != before:
                before, since = look, time.monotonic()
            patience = options.patience
            limit = patience if state in ("training", "unknown") else min(SETTLE, patience)
            if time.monotonic() - since > limit:
                why = {
                    "unknown": "no training has begun, or status.json is damaged",
                    "training": f"training is at iteration {iteration}",
                    "lost": f"training was lost after iteration {iteration}",
                }.get(state, f"training has {state}; checkpoint {iteration} is missing or damaged")
                _say(f"error: {run_dir}: nothing has changed for {limit:g} s (--patience); {why}")
                return 1
            time.sleep(min(options.poll, limit))

    def _evaluate_next(self) -> bool:
        """Evaluate the oldest checkpoint that is not done; return whether there was one."""
        if not self._evaluator.prepare():
            return False
        # Read the rows again each time: an earlier or a second watcher may have added some.
        self._done |= self._evaluator.evaluated()
        for iteration, path in checkpoint.numbered_checkpoints(self._run_dir).items():
            if iteration in self._done:
                continue
            try:
                saved = checkpoint.load(path)
            except UserError as error:
                # Training keeps only the newest few, so it may be gone. It may write one again.
                if path.exists() and str(error) not in self._said:
                    self._said.add(str(error))
                    _say(f"{error}; left out, unless it is written again")
                continue
            self._evaluator.evaluate(saved)
            return True
        return False

    def _look(self) -> set[tuple[str, int]]:
        """Return names and times of files: they differ once training has written, even in part."""
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
