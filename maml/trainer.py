"""The outer loop: ids → strategy → mean gradient → optimizer → log → checkpoint."""

from __future__ import annotations

import sys
import time
from typing import Any

from torch import Tensor

from datasets.words import counted
from maml.config import Config
from maml.config.presets import experiment
from maml.errors import UserError
from maml.metagradient.outer_optimizer import NotFiniteError
from maml.run import directory, progress
from maml.run.guard import Guard
from maml.run.log import RunLog
from maml.run.provenance import own_files
from maml.run.window import Window
from maml.training import testing
from maml.training.ending import Ending
from maml.training.keeper import Companion, Keeper
from maml.training.run import Run
from maml.training.setup import Setup
from maml.training.validations import Validations
from maml.worker import Share


class Trainer:
    """Trains, validates, tests, and leaves a run directory."""

    def __init__(self, config: Config) -> None:
        """Open and check all that the run needs; rank 0 takes the run directory."""
        self.setup = Setup(config)

    def run(self) -> int:
        """Do this process's part; return the exit code."""
        with self.setup.entered() as drives:
            if not drives:
                self.setup.strategy.serve()
                return 0
            self._begin()
            try:
                with self.ending.watched(), self.patience.watching():
                    self._train()
                    self.ending.heed_stop()
                    self.keeper.save()
                    result = self._test()
                    self.ending.finish()
                    if self.state.speaks:
                        testing.draw(self.state, self.validations.chosen(), result)
                return self.ending.code
            finally:
                self.state.log.close(failed=not self.ending.done)
        return 0  # all was done when another one was lost

    def _begin(self) -> None:
        """Make the run's companions, and bring them to where it begins."""
        config, strategy, (start, initial) = (
            self.setup.config,
            self.setup.strategy,
            self.setup.begun,
        )
        self.state = run = Run(config, strategy, initial)
        self.patience = progress.Patience(lambda: run.worker.progress, speaks=run.speaks)
        self.window = Window(run.worker.metric_names)
        # As they were imported; they may be edited while it trains.
        own = own_files(config)
        self.guard = Guard(config, run.dir, own, speaks=run.speaks)
        self.validations = Validations(run)
        companions: dict[str, Companion] = {
            "guard": self.guard, "window": self.window, "best": self.validations.best
        }  # fmt: skip
        self.keeper = Keeper(run, companions, own)
        self.ending = Ending(run, self.keeper)
        self.keeper.begin(start)
        run.log = RunLog(run.dir, config)
        run.log.forget_after(run.iteration)
        self.is_validated = self.validations.recall()
        run.say(
            f"{experiment(config)}: strategy {config.strategy}, "
            f"{counted(strategy.world.size, 'process', 'processes')}, "
            f"iterations {run.iteration} to {config.iterations}, run directory {run.dir}"
        )
        if slow := run.worker.why_no_kernels():
            run.say(f"{slow}: it is differentiated by torch, which is slower")

    def _train(self) -> None:
        run, config, heed_stop = self.state, self.setup.config, self.ending.heed_stop
        shown: dict[str, Any] = {"speaks": run.speaks, "initial": run.iteration}
        with progress.bar(config.iterations, "training", "it", **shown) as bar:
            # The run may have been stopped in the middle of a validation.
            if run.iteration and run.is_due(config.eval_every) and not self.is_validated:
                self.validations.validate(bar, heed_stop)
            while run.iteration < config.iterations and not run.strategy.stopping:
                began = time.perf_counter()
                self.patience.begin(run.iteration + 1)
                ids = run.worker.training.ids(run.iteration, config.meta_batch_size)
                share = run.strategy.meta_step(run.params, ids)
                self.patience.end()
                with run.changing:
                    self._step(share, ids, began, bar)
                if run.is_due(config.checkpoint_every):
                    self.keeper.save()
                if run.is_due(config.eval_every):
                    self.validations.validate(bar, heed_stop)

    def _step(self, share: Share, ids: Tensor, began: float, bar: Any) -> None:
        """Step along the gradient that has come home; write the row that is due."""
        run, loss = self.state, float(share.totals[0]) / share.n_tasks
        number = run.iteration + 1

        def warn(line: str) -> None:
            bar.write(f"warning: {line}", file=sys.stderr)

        try:
            run.step(share, loss)
            took = time.perf_counter() - began
            self.window.add(share, took)
            self.guard.taken(number, loss, run.optimizer.peak, warn)
        except NotFiniteError as error:
            took = time.perf_counter() - began
            tasks = run.strategy.tasks_of_step(ids)
            try:
                self.guard.refuse(number, loss, str(error), tasks, run.params, warn)
            except UserError as end:
                raise self.keeper.before(end) from None
            self.window.skip(took)
        run.count(took)
        bar.update()
        if run.is_due(self.setup.config.log_every) or number == self.setup.config.iterations:
            row = self.window.close(run.strategy.report(), run.worker.stopwatch.take())
            run.write(row | {"gradient_norm": run.optimizer.norm})
            shown = {n: f"{row[n]:.3f}" for n in run.worker.metric_names if n in row}
            bar.set_postfix(shown | {"tasks/s": f"{row['tasks_per_second']:.0f}"}, refresh=False)

    def _test(self) -> dict[str, Any]:
        """Test, and write result.json."""
        run, config, (iteration, params) = self.state, self.setup.config, self.validations.chosen()
        if config.test_tasks and config.test_model == "best":
            validated = self.validations.best.iteration is not None
            why = "which validated best" if validated else "the last, as none was validated"
            run.say(f"tested is the model after iteration {iteration}, {why}")
        result = testing.test(run, (iteration, params), self.ending.heed_stop)
        if run.speaks:
            result |= self.guard.report(run.iteration)
            directory.write_result(run.dir, result)
            # The result is safe by now, whatever becomes of a hint.
            if config.eval_every:
                run.say(self.validations.insight.advice(params, iteration))
        return result
