"""The outer loop: ids → strategy → mean gradient → optimizer → log → checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datasets.words import counted
from maml.best import BestModel, best
from maml.config import OF_A_CHECKPOINT, Config, registry
from maml.config.presets import changed, experiment, published_row, with_values
from maml.errors import UserError, WorkerLostError
from maml.initial import initial_weights, met_before
from maml.learners.data import class_names
from maml.library.model import Model
from maml.metagradient.outer_optimizer import NotFiniteError, OuterOptimizer
from maml.params import Params
from maml.plots import style
from maml.plots.curves import draw_curves
from maml.plots.tasks import panel
from maml.processes.device import choose_device
from maml.processes.garbage import settled
from maml.processes.setup import init_process
from maml.processes.signals import exit_code
from maml.processes.world import World
from maml.run import checkpoint, directory, progress
from maml.run.guard import Guard
from maml.run.insight import Insight
from maml.run.lock import Lock
from maml.run.log import RunLog
from maml.run.progress import Patience
from maml.run.provenance import own_files, warn_of_edits
from maml.run.resume import beginning, bring_history, choose_run_dir
from maml.run.task_scores import drop_tasks, write_tasks
from maml.run.window import Window
from maml.scores import (
    check_headline,
    evaluate,
    few_classes,
    means,
    no_answers,
    of_tasks,
    same_classes,
    summary,
    with_headline,
)
from maml.strategies import Strategy, build_strategy, resolve_strategy
from maml.worker import Share, Worker

ONE_BY_ONE = (
    "--batching tasks: tasks are computed one after the other, as torch.func.vmap cannot batch "
    "them, or finds another gradient"
)


class Trainer:
    """Trains, validates, tests, and leaves a run directory."""

    def __init__(self, config: Config) -> None:
        self.world = World.from_environment()
        # Resolved now, so that config.yaml says what was used.
        self.config = with_values(config, strategy=resolve_strategy(config, self.world))
        init_process(self.config, self.world)
        # For whoever looks on, once training begins.
        self.lines: list[str] = []
        # Before any image is decoded, which may take long.
        self.classes = class_names(self.config)
        self.worker = Worker(self.config, choose_device(self.config, self.world))
        learner = self.worker.learner
        if config.batching == "auto" and learner.batching == "tasks":
            self.lines.append(ONE_BY_ONE)
        self.config = with_values(self.config, batching=learner.batching)
        one_pass = self.worker.training.one_pass
        if config.epochs is not None and one_pass is not None:
            iterations = math.ceil(config.epochs * one_pass / config.meta_batch_size)
            self.config = with_values(self.config, iterations=iterations)
        splits = {"test": config.test_tasks, "validation": config.eval_every}
        for split in [split for split, count in splits.items() if count]:
            self.worker.evaluation(split)
            headline = check_headline(self.worker, split, config.transductive, "--no-transductive")
            self.lines += [headline, few_classes(self.worker, split)]
        if self.world.rank == 0:
            opened = [split for split in ("validation", "test") if splits[split]]
            self.lines.append(same_classes(self.worker, opened))
        # What it refuses all processes refuse, and the launcher ends the others when one has. So
        # rank zero has nothing on the disk yet that would be left behind.
        self.strategy = build_strategy(self.config, self.world, self.worker)
        self.start: dict[str, Any] | None = None
        self.initial: Params | None = None
        self.claim: Lock | None = None
        self._made: list[Path] = []
        if self.world.rank == 0:
            # Now, so that a bad --run-dir or --resume ends the run before any worker is waited for.
            run_dir = choose_run_dir(self.config, self._made)
            self.config = with_values(self.config, run_dir=str(run_dir))
            self.claim = Lock(run_dir)
            try:
                params = self.worker.learner.meta_parameters()
                self.start = beginning(run_dir, self.config, params)
                if self.start is None and config.init is not None:
                    self.initial, line = initial_weights(config.init, self.worker.learner)
                    self.lines += [line, met_before(config.init, self.config, self.classes)]
                if self.start is not None:
                    checkpoint.check_division(self.start, self.worker.training.division, run_dir)
            except BaseException:
                self._release()
                raise

    def run(self) -> int:
        """Do this process's part; return the exit code."""
        try:
            return self._run()
        finally:
            self._release()

    def _release(self) -> None:
        """Give the run directory back; one that was made for nothing goes."""
        if self.claim is not None:
            self.claim.release()
            directory.unmake(Path(self.config.run_dir or ""), self._made)

    def _run(self) -> int:
        strategy = self.strategy
        # Before any peer waits for this process.
        self.worker.get_ready(strategy.share_sizes())
        liveness = strategy.liveness
        liveness.note = self.config.run_dir or ""
        if self.world.rank:
            liveness.last_words = lambda line: directory.lose(Path(liveness.note))
        if self.world.rank == 0:
            # Each once: both splits may say the same.
            for line in filter(None, dict.fromkeys(self.lines)):
                print(line, file=sys.stderr, flush=True)
        with settled(), strategy:
            if not strategy.drives:
                strategy.serve()
                return 0
            if self.world.rank == 0 and self.classes is not None:
                directory.write_classes(Path(self.config.run_dir or ""), self.classes)
            run_dir, start, initial = strategy.from_rank_zero(
                (self.config.run_dir, self.start, self.initial)
            )
            config = with_values(self.config, run_dir=run_dir)
            return _Run(config, self.worker, strategy, start, initial).run()
        return 0  # all was done when another one was lost


class _Run:
    """One training run, seen from a driving process."""

    def __init__(
        self,
        config: Config,
        worker: Worker,
        strategy: Strategy,
        start: dict[str, Any] | None,
        initial: Params | None,
    ) -> None:
        """Begin where the checkpoint ``start`` ended, or anew: with ``initial``, if it is given."""
        self.config, self.worker, self.strategy = config, worker, strategy
        self.speaks = strategy.world.rank == 0
        assert config.run_dir is not None
        self.run_dir = Path(config.run_dir)
        initial = initial or worker.learner.meta_parameters()
        self.optimizer = OuterOptimizer(
            config,
            {name: tensor.to(strategy.home) for name, tensor in initial.items()},
            [f"network.{name}" for name in worker.learner.frozen],
        )
        self.meta_params = self.optimizer.params
        self.iteration, self.seconds = 0, 0.0
        # Held while parameters, their optimizer, the iteration and the log do not belong together.
        self._between = threading.RLock()
        self._patience = Patience(lambda: worker.progress, speaks=self.speaks)
        self._insight = Insight(worker)
        # As they were imported; they may be edited while it trains.
        self._own_files = own_files(config)
        self._guard = Guard(config, self.run_dir, self._own_files, speaks=self.speaks)
        # Whether parameters, optimizer and iteration belong together; what is saved of them.
        self._whole, self._saved = True, -1
        self._done = False
        self._best_model = BestModel(transductive=config.transductive)
        self._window = Window(worker.metric_names)
        if start is not None:
            self._restore(start)
        self.began_at = self.iteration
        if self.speaks:
            warn_of_edits(config, start or {})
            self._starts = directory.write_config(
                self.run_dir,
                self.config,
                iteration=self.iteration,
                processes=strategy.world.size,
                threads=torch.get_num_threads(),
                device=str(worker.device),
                begun=start.get("starts", []) if start else [],
            )
            if start is not None:
                bring_history(self.run_dir, config)
                checkpoint.continue_from(self.run_dir, start, is_last=config.resume == "auto")
        self.log = RunLog(self.run_dir, self.config)
        self.log.forget_after(self.iteration)
        validation = strategy.from_rank_zero(self._validated())
        if validation is not None:
            # It came after this iteration's checkpoint.
            self._offer(validation)

    def run(self) -> int:
        """Train to the end, or to a stop signal; return the exit code."""
        self.strategy.stop.install()
        if self.speaks:
            self.strategy.liveness.last_words = self._last_words
        config = self.config
        self._say(
            f"{experiment(config)}: strategy {config.strategy}, "
            f"{counted(self.strategy.world.size, 'process', 'processes')}, "
            f"iterations {self.iteration} to {config.iterations}, run directory {self.run_dir}"
        )
        slow = self.worker.why_no_kernels()
        if slow is not None:
            self._say(f"{slow}: it is differentiated by torch, which is slower")
        try:
            self._status("training")
            hurried = self.strategy.stop.hurried(self._abandon)
            try:
                with (
                    hurried if self.speaks else contextlib.nullcontext(),
                    self._patience.watching(),
                ):
                    self._train()
                    self._heed_stop()
                    self._save()
                    result = self._test()
                    # What comes while pictures are drawn, a stop or a loss, takes nothing back.
                    with self._between:
                        self._status("finished")
                        self._done = True
                    if self.speaks:
                        self.strategy.liveness.finish()
                        self._draw(result)
                return 0
            except _Stopped:
                # Torchrun stops all when one was killed, and that is another end.
                self.strategy.liveness.check()
                self._save()
            return self._stopped(self.strategy.stopping)
        except BaseException as error:
            if not self._done:
                if isinstance(error, Exception):
                    self._rescue()
                with contextlib.suppress(UserError):
                    self._status("failed")
            raise
        finally:
            self.log.close(failed=not self._done)

    def _status(self, state: str) -> None:
        if self.speaks:
            directory.write_status(self.run_dir, state, self.iteration, self.began_at, self.config)

    def _stopped(self, by: str | None) -> int:
        """Say that the run was stopped, and has its checkpoint; return the exit code."""
        assert by is not None
        self._status("stopped")
        self._say(
            f"stopped by {by} after iteration {self.iteration}; checkpoint "
            f"{self._last()}; the same command with "
            f"--run-dir {self.run_dir} continues"
        )
        return exit_code(by)

    def _stopped_drawing(self, by: str) -> int:
        """Say that the run is finished, but for its pictures; return the exit code."""
        self._say(
            f"stopped by {by} while pictures were drawn; the run is finished, and its result in "
            f"{self.run_dir}; python -m maml.plots {self.run_dir} draws"
        )
        return exit_code(by)

    def _last_words(self, line: str) -> None:
        """Save the last whole iteration, in a thread, as this process ends for another's loss."""
        if self._between.acquire(timeout=5) and not self._done:
            self._rescue()
            with contextlib.suppress(UserError):
                self._status("failed")

    def _abandon(self, by: str) -> None:
        """Save the last whole iteration and end, while the main thread is in the middle of one."""
        with self._between:
            code = 1
            try:
                if self._done:
                    code = self._stopped_drawing(by)
                else:
                    self._save()
                    code = self._stopped(by)
                # So that the others know that nobody was lost.
                self.strategy.liveness.fail(WorkerLostError(f"stopped by {by}"))
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(code)

    def _heed_stop(self) -> None:
        if self.strategy.stopping:
            self.strategy.stop.heed()
            raise _Stopped

    def _train(self) -> None:
        config = self.config
        episodes = self.worker.training
        bar = progress.bar(
            config.iterations, "training", "it", speaks=self.speaks, initial=self.iteration
        )
        with bar:
            if self._owes_validation():
                self._validate(bar)
            while self.iteration < config.iterations and not self.strategy.stopping:
                began = time.perf_counter()
                self._patience.begin(self.iteration + 1)
                ids = episodes.ids(self.iteration, config.meta_batch_size)
                share = self.strategy.meta_step(self.meta_params, ids)
                with self._between:
                    self._step(share, ids, began, bar)
                if self._due(config.checkpoint_every):
                    self._save()
                if self._due(config.eval_every):
                    self._validate(bar)

    def _step(self, share: Share, ids: Tensor, began: float, bar: Any) -> None:
        """Step along the gradient that has come home; write the row that is due."""
        self._patience.end()
        window = self._window
        number, loss = self.iteration + 1, float(share.totals[0]) / share.n_tasks

        def warn(line: str) -> None:
            bar.write(f"warning: {line}", file=sys.stderr)

        try:
            self._move(share, loss)
            took = time.perf_counter() - began
            window.add(share, took)
            self._guard.taken(number, loss, self.optimizer.peak, warn)
        except NotFiniteError as error:
            took = time.perf_counter() - began
            tasks = self.strategy.tasks_of_step(ids)
            try:
                self._guard.refuse(number, loss, str(error), tasks, self.meta_params, warn)
            except UserError as end:
                raise self._with_checkpoint(end) from None
            window.skip(took)
        self.iteration, self._whole = number, True
        self.seconds += took
        bar.update()
        if self.iteration % self.config.log_every and self.iteration != self.config.iterations:
            return
        row = window.row() | self.strategy.report()
        row["gradient_norm"] = self.optimizer.norm
        spent = self.worker.stopwatch.take()
        # What is left is for messages, and for waiting for others.
        row["time"] = spent | {"elsewhere": max(0.0, window.seconds - sum(spent.values()))}
        self.log.write({"iteration": self.iteration, **row, "seconds": self.seconds})
        bar.set_postfix(
            {name: f"{row[name]:.3f}" for name in self.worker.metric_names if name in row}
            | {"tasks/s": f"{row['tasks_per_second']:.0f}"},
            refresh=False,
        )
        window.clear()

    def _move(self, share: Share, loss: float) -> None:
        """Take the step, whole.

        Every driving process holds the same sums, and so decides the same.

        Raises:
            NotFiniteError: if it cannot be taken; all is as it was.
        """
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss is {loss}")
        self._whole = False
        try:
            with self.worker.stopwatch.spent_on("updating"):
                self.optimizer.step(share.gradients, share.n_tasks, self.iteration)
        except NotFiniteError:
            self._whole = True
            raise

    def _due(self, every: int) -> bool:
        return every > 0 and self.iteration % every == 0

    def _owes_validation(self) -> bool:
        """Say whether the run was stopped in the middle of this iteration's validation."""
        if not self.iteration or not self._due(self.config.eval_every):
            return False
        return self.strategy.from_rank_zero(self._validated()) is None

    def _validated(self) -> dict[str, Any] | None:
        """Return the row of this iteration's validation, if there is one; on rank zero."""
        return self.log.find(self.iteration, "validation") if self.speaks else None

    def _offer(self, validation: dict[str, Any]) -> None:
        """Keep the parameters, which were validated now, where the best ones are tested."""
        if self.config.test_model == "best":
            with self._between:
                self._best_model.offer(validation, self.iteration, self.meta_params)

    def _tested(self) -> tuple[int, Params]:
        """Return what is tested: the iteration and the parameters."""
        best = self._best_model
        if best.iteration is None:
            return self.iteration, self.meta_params
        return best.iteration, best.model

    def _validate(self, bar: Any) -> None:
        result = evaluate(
            self.strategy,
            self.meta_params,
            "validation",
            self.config.eval_tasks,
            between=self._heed_stop,
        )
        self._offer(result)
        if self.speaks:
            result |= self._insight.row(self.meta_params, self.iteration)
        self.log.write({"iteration": self.iteration, **result, "seconds": self.seconds})
        if self.speaks:
            line = summary(result, self.config, self.config.transductive)
            bar.write(f"iteration {self.iteration}: {line}", file=sys.stderr)

    def _test(self) -> dict[str, Any]:
        """Evaluate on the test split; return what result.json holds."""
        config = self.config
        tested, params = self._tested()
        tasks_per_second = None
        if self.seconds:
            tasks_per_second = self.iteration * config.meta_batch_size / self.seconds
        result: dict[str, Any] = {
            "accuracy": None, "ci95": None, "tasks": config.test_tasks,
            "transductive": config.transductive, "non_transductive_accuracy": None,
            "preset": config.preset, **published_row(config),
            "changed": changed(config),
            "iterations": self.iteration,
            "tested_iteration": tested if config.test_tasks else None,
            "seconds": self.seconds, "tasks_per_second": tasks_per_second,
        }  # fmt: skip
        if config.test_tasks:
            if config.test_model == "best":
                validated = self._best_model.iteration is not None
                why = "which validated best" if validated else "the last, as none was validated"
                self._say(f"tested is the model after iteration {tested}, {why}")
            values = of_tasks(
                self.strategy,
                params,
                "test",
                config.test_tasks,
                progress=self.speaks,
                between=self._heed_stop,
            )
            names = self.worker.evaluation_names
            if self.speaks:
                write_tasks(self.run_dir, "test", config.seed, names, values.tolist())
            test = means(values, "test", names)
            self.log.write({"iteration": self.iteration, **test, "seconds": self.seconds})
            result |= with_headline(test, transductive=config.transductive)
            if self.speaks and (images := self.worker.evaluation("test").content()) is not None:
                result["test_images"] = images
            self._say(summary(test, config, config.transductive))
            if line := no_answers(test):
                self._say(line)
        elif self.speaks:
            drop_tasks(self.run_dir)
        if self.speaks:
            result |= self._guard.report(self.iteration)
            directory.write_result(self.run_dir, result)
            # The result is safe by now, whatever becomes of a hint.
            if config.eval_every and (advice := self._insight.advice(params, tested)):
                self._say(advice)
        return result

    def _draw(self, result: dict[str, Any]) -> None:
        if registry.learner(self.config.learner).tasks == "environments":
            self._say("playing episodes of a test task for filmstrip.png")
        plot = draw_curves(self.run_dir, self.config, result, self.worker, self._tested()[1])
        self._picture(plot)
        self._say(f"run directory {self.run_dir}, plot {plot}")

    def _picture(self, curves: Path) -> None:
        """Hand the sink the curves, and a test task with its answers."""
        if not self.log.has_sink:
            return
        self.log.picture("pictures/curves", curves, self.iteration)
        if registry.learner(self.config.learner).tasks != "episodes":
            return
        iteration, params = self._tested()
        model = Model(self.worker.learner, params, iteration, self.worker.device)
        drawn = panel(model)
        if drawn is not None:
            (path,) = style.save(drawn, self.run_dir / "task", ["png"])
            self.log.picture("pictures/task", path, self.iteration)

    def _save(self) -> None:
        if not self.optimizer.is_finite():
            before = f"{self._last()} is from before" if self._last().exists() else "none is saved"
            raise UserError(
                f"parameters are not finite after iteration {self.iteration}: training has "
                f"diverged; {before}; a smaller --meta-lr may help"
            )
        if not self.speaks:
            return
        with self._between:
            # First: a status is never behind a checkpoint, whenever this process is killed. Where
            # it cannot be written, that is no reason not to save.
            with contextlib.suppress(UserError):
                self._status("training")
            checkpoint.save_in(
                self.run_dir,
                {
                    "model": {name: tensor.cpu() for name, tensor in self.meta_params.items()},
                    "optimizer": self.optimizer.state_dict(),
                    "iteration": self.iteration,
                    "seconds": self.seconds,
                    "strategy": self.strategy.state(),
                    "division": self.worker.training.division,
                    "guard": self._guard.state(),
                    "window": self._window.state(),
                    "wire_bytes": self.strategy.wire_bytes,
                    "own_files": self._own_files,
                    "starts": self._starts,
                    "best": self._best_model.state(),
                    "config": {name: getattr(self.config, name) for name in OF_A_CHECKPOINT},
                },
                keep=self.config.keep_checkpoints,
                best=self._best(),
            )
            self._saved = self.iteration

    def _best(self) -> list[int]:
        """Return the iterations of the checkpoints that stay for having validated best."""
        if not self.config.keep_best:
            return []
        there = checkpoint.numbered_checkpoints(self.run_dir)
        ordered = best(self.run_dir, there, transductive=self.config.transductive)
        return ordered[: self.config.keep_best]

    def _with_checkpoint(self, error: UserError) -> UserError:
        """Save the run as it is before a step that ends it; return the error that names the file.

        Every process that takes steps comes here, and rank zero alone saves.
        """
        try:
            self._save()
        except UserError as other:
            return UserError(f"{error}; and {other}")
        return UserError(f"{error}; {self._last()} is from before that step")

    def _rescue(self) -> None:
        """Save the last whole iteration of a run that fails, if that can be done."""
        if not (self.speaks and self._whole and self.iteration > self._saved):
            return
        with contextlib.suppress(UserError):
            self._save()
            self._say(f"saved after iteration {self.iteration}: {self._last()}")

    def _last(self) -> Path:
        return checkpoint.last_checkpoint(self.run_dir)

    def _restore(self, saved: dict[str, Any]) -> None:
        for name, tensor in self.meta_params.items():
            tensor.copy_(saved["model"][name])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.iteration, self.seconds = saved["iteration"], saved["seconds"]
        self.strategy.restore(saved.get("strategy", {}))
        self._guard.restore(saved.get("guard", {}))
        self._window.restore(saved.get("window", {}), self.strategy.home)
        self.strategy.wire_bytes = saved.get("wire_bytes", 0)
        self._best_model.restore(saved.get("best", {}), self.strategy.home)
        self._saved = self.iteration

    def _say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)


class _Stopped(Exception):
    """A stop signal came: end in good order."""
