"""Open and check what a process needs for a run, before any process waits for another."""

import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets.components import is_theirs
from datasets.locks import HeldError, Lock
from maml.config import Config
from maml.config.fields import user_path, with_values
from maml.errors import UserError
from maml.evaluation.scores import check_answers, check_headline, check_own_data
from maml.processes.setup import choose_device, init_process
from maml.processes.streams import log_in
from maml.processes.world import World
from maml.run import checkpoint, directory
from maml.strategies import build_strategy, resolve_strategy
from maml.training.initial import beginning, initial_weights, met_before
from maml.worker import Worker


class Setup:
    """Everything that a run is started with.

    Attributes:
        config: The resolved configuration, which config.yaml records.
        strategy: Where tasks run; not entered yet.
        begun: The checkpoint to continue from, and the weights of ``--init``; each may be None. The
            other driving processes get them in `entered`.
    """

    def __init__(self, config: Config) -> None:
        self.world = World.from_environment()
        self.config = with_values(config, strategy=resolve_strategy(config, self.world))
        init_process(self.config, self.world)
        # List the classes before any image is decoded, because decoding may take long.
        self.worker = Worker(self.config, choose_device(self.config, self.world))
        self.config = with_values(self.config, batching=self.worker.learner.batching)
        one_pass = self.worker.training.one_pass
        if config.epochs is not None and one_pass is not None:
            iterations = math.ceil(config.epochs * one_pass / config.meta_batch_size)
            self.config = with_values(self.config, iterations=iterations)
        self.lines = [*self.worker.warnings]
        if why := self.worker.why_one_by_one:
            self.lines.append(f"--batching tasks: {why}, so tasks are computed one by one")
        asked = {"validation": config.eval_every, "test": config.test_tasks}
        splits = [split for split, count in asked.items() if count]
        for split in splits:
            self.worker.evaluation(split)
            line = check_headline(self.worker, split, config.transductive, "--no-transductive")
            self.lines.append(line)
        self.lines.append(check_answers(self.worker.learner))
        self.lines += check_own_data(self.worker, splits, trains=True)
        opened = {"train": self.worker.training} | {s: self.worker.evaluation(s) for s in splits}
        # Names of a user's own function may be numbers, which say nothing about other splits.
        named = {} if is_theirs(self.config.data) else opened
        self.classes = {s: [*each.class_names] for s, each in named.items() if each.class_names}
        # Its errors occur on every rank, so it is built before rank 0 writes files.
        self.strategy = build_strategy(self.config, self.world, self.worker)
        self.begun: list[Any] = [None, None]
        self._held = contextlib.ExitStack()
        if self.world.rank == 0:
            self._claim_run_dir()
        elif config.run_dir is not None:
            log_in(user_path("run_dir", config.run_dir))

    def _claim_run_dir(self) -> None:
        """Lock the run directory and find where the run begins, before waiting for any worker."""
        run_dir = directory.choose(self.config)
        self.config = config = with_values(self.config, run_dir=str(run_dir))
        lock = Lock(run_dir / ".lock")
        try:
            # Two runs would overwrite each other's rows. Not every shared folder has locks: without
            # locks a second run is not noticed.
            lock.acquire()
        except HeldError:
            raise UserError(
                f"--run-dir {run_dir}: {lock.holder()} is training into it; end it first, or "
                "choose another directory"
            ) from None
        log_in(run_dir)
        # After the lock's release, remove a directory that was made for nothing.
        self._held.callback(directory.unmake, run_dir)
        self._held.callback(lock.release)
        try:
            learner = self.worker.learner
            start = self.begun[0] = beginning(run_dir, config, learner.meta_parameters())
            if start is not None:
                checkpoint.check_division(start, self.worker.training.division, run_dir)
            elif config.init is not None:
                self.begun[1], line = initial_weights(config.init, learner)
                self.lines += [line, met_before(config.init, self.classes)]
        except BaseException:
            self._held.close()
            raise

    @contextlib.contextmanager
    def entered(self) -> Iterator[bool]:
        """Enter the strategy; yield whether this process drives the outer loop."""
        strategy = self.strategy
        with self._held:
            # Print each line once, because both splits may give the same line.
            for line in filter(None, dict.fromkeys(self.lines)) if self.world.rank == 0 else ():
                print(line, file=sys.stderr, flush=True)
            # Before any peer waits for this process.
            self.worker.get_ready(strategy.share_sizes())
            with strategy:
                if strategy.drives:
                    if self.world.rank == 0 and self.classes:
                        names = Path(self.config.run_dir or "") / "classes.json"
                        directory.write_json(names, self.classes)
                    run_dir, *self.begun = strategy.from_rank_zero(
                        (self.config.run_dir, *self.begun)
                    )
                    self.config = with_values(self.config, run_dir=run_dir)
                yield strategy.drives
