"""The outer loop: ids → strategy → mean gradient → optimizer → log → checkpoint."""

import sys
import time
from typing import Any

from torch import Tensor

from datasets.words import counted
from maml.config import Config, registry
from maml.config.presets import changed, experiment
from maml.metagradient.outer_optimizer import NotFiniteError
from maml.processes.namespaces import exposed_to
from maml.run import directory, progress
from maml.run.files import read_rows
from maml.run.log import RunLog
from maml.run.reading import history
from maml.training import testing
from maml.training.ending import Ending
from maml.training.guard import Guard
from maml.training.run import Run
from maml.training.setup import Setup
from maml.worker import Share


class Trainer:
    """Trains, validates, tests, and writes a run directory."""

    def __init__(self, config: Config) -> None:
        """Open and check all that the run needs; rank 0 locks the run directory."""
        self.setup = Setup(config)

    def run(self) -> int:
        """Do this process's part; return the exit code."""
        with self.setup.entered() as drives:
            if not drives:
                self.setup.strategy.serve()
                return 0
            self._begin()
            try:
                with self.ending.watched():
                    self._train()
                    self.ending.heed_stop()
                    self.state.save()
                    result = self._test()
                    self.ending.finish()
                    if self.state.speaks:
                        testing.draw(self.state, self.validations.chosen()[1], result)
                return self.ending.code
            finally:
                self.state.log.close(failed=not self.ending.done)
        return 0  # another process was lost after the run was done

    def _begin(self) -> None:
        """Make the run and its companions, and restore their states from its checkpoint, if any."""
        config, strategy = self.setup.config, self.setup.strategy
        start, initial = self.setup.begun
        self.state = run = Run(config, strategy, initial)
        self.guard = Guard(run)
        self.validations = testing.Validations(run)
        self.ending = Ending(run)
        best = self.validations.best
        run.begin(start, {"guard": self.guard, "best": best})
        run.log = RunLog(run.dir, config)
        run.log.forget_after(run.iteration)
        self.is_validated = self.validations.recall()
        run.say(
            f"{experiment(config)}: strategy {config.strategy}, "
            f"{counted(strategy.world.size, 'process', 'processes')}, "
            f"iterations {run.iteration} to {config.iterations}, run directory {run.dir}"
        )
        if "eval_inner_steps" in changed(config):
            steps = counted(config.eval_inner_steps, "inner step")
            run.say(f"tests take {steps} (--eval-inner-steps); training takes {config.inner_steps}")
        if registry.data_set(config.data).own_images:
            size = f"{config.image_size}x{config.image_size} pixels"
            run.say(f"images are scaled to {size} (--image-size, --image-mode)")
        if slow := run.worker.why_no_kernels():
            run.say(f"{slow}: it is differentiated by torch, which is slower")
        run.say(exposed_to(strategy.world))
        run.say(strategy.advice)

    def _train(self) -> None:
        run, config, heed_stop = self.state, self.setup.config, self.ending.heed_stop
        shown: dict[str, Any] = {"speaks": run.speaks, "initial": run.iteration}
        with progress.bar(config.iterations, "training", "it", **shown) as bar:
            # The run may have been stopped in the middle of a validation.
            if run.iteration and run.is_due(config.eval_every) and not self.is_validated:
                self.validations.validate(bar, heed_stop)
            while run.iteration < config.iterations and not self.validations.enough:
                if run.strategy.stopping:
                    break
                began = time.perf_counter()
                ids = run.worker.training.ids(run.iteration, config.meta_batch_size)
                share = run.strategy.meta_step(run.params, ids)
                with run.changing:
                    self._step(share, ids, began, bar)
                validates = run.is_due(config.eval_every)
                # Each validated model may be among the best.
                if run.is_due(config.checkpoint_every) or (validates and config.keep_best):
                    run.save()
                if validates:
                    self.validations.validate(bar, heed_stop)

    def _step(self, share: Share, ids: Tensor, began: float, bar: Any) -> None:
        """Take the outer step along the gradient of ``share``; write a row of metrics if due."""
        run = self.state

        def warn(line: str) -> None:
            bar.write(f"warning: {line}", file=sys.stderr)

        try:
            loss = run.step(share)
            took = time.perf_counter() - began
            self.guard.look(loss, warn)
            run.count(share, took)
        except NotFiniteError as error:
            took = time.perf_counter() - began
            self.guard.refuse(error.loss, str(error), run.strategy.tasks_of_step(ids), warn)
            run.count(None, took)
        bar.update()
        if run.is_due(run.config.log_every) or run.iteration == run.config.iterations:
            row = run.report()
            shown = {n: f"{row[n]:.3f}" for n in run.worker.metric_names if n in row}
            bar.set_postfix(shown | {"tasks/s": f"{row['tasks_per_second']:.0f}"}, refresh=False)

    def _test(self) -> dict[str, Any]:
        """Test, and write result.json."""
        run, config, (iteration, params) = self.state, self.setup.config, self.validations.chosen()
        if self.validations.enough:
            run.say(f"training ended after iteration {run.iteration}: --stop-after")
        if config.test_tasks and config.test_model == "best":
            validated = self.validations.best.iteration is not None
            why = "which validated best" if validated else "the last, as no model was validated"
            run.say(f"testing the model after iteration {iteration}, {why}")
        result = testing.test(run, (iteration, params), self.ending.heed_stop)
        if run.speaks:
            result["diverged"] = self.guard.diverged()
            rows = read_rows(run.dir / "metrics.jsonl")
            result["skipped"] = int(sum(history(rows, "train/skipped").values()))
            directory.write_json(run.dir / "result.json", result)
        return result
