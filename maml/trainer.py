"""The outer loop: ids → strategy → mean gradient → optimizer → log → checkpoint."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from maml.config import MUST_MATCH, Config, registry
from maml.config.presets import changed, with_values
from maml.errors import UserError
from maml.metagradient.outer_optimizer import OuterOptimizer
from maml.processes.device import choose_device
from maml.processes.setup import init_process
from maml.processes.world import World
from maml.run import checkpoint, directory
from maml.run.lock import Lock
from maml.run.log import RunLog
from maml.run.plots import draw_curves
from maml.run.progress import Patience
from maml.run.resume import beginning, choose_run_dir
from maml.scores import evaluate, summary
from maml.strategies import Strategy, build_strategy, resolve_strategy
from maml.worker import Share, Worker


class Trainer:
    """Trains, validates, tests, and leaves a run directory."""

    def __init__(self, config: Config) -> None:
        self.world = World.from_environment()
        # Resolved now, so that config.yaml says what was used.
        self.config = with_values(config, strategy=resolve_strategy(config, self.world))
        init_process(self.config, self.world)
        self.worker = Worker(self.config, choose_device(self.config, self.world))
        one_pass = self.worker.training.one_pass
        if config.epochs is not None and one_pass is not None:
            iterations = math.ceil(config.epochs * one_pass / config.meta_batch_size)
            self.config = with_values(self.config, iterations=iterations)
        if config.test_tasks:
            self.worker.evaluation("test")
        if config.eval_every:
            self.worker.evaluation("validation")
        self.start: dict[str, Any] | None = None
        self.claim: Lock | None = None
        if self.world.rank == 0:
            # Now, so that a bad --run-dir or --resume ends the run before any worker is waited for.
            directory = choose_run_dir(self.config)
            self.config = with_values(self.config, run_dir=str(directory))
            self.claim = Lock(directory)
            try:
                params = self.worker.learner.meta_parameters()
                self.start = beginning(directory, self.config, params)
                if self.start is not None:
                    checkpoint.check_division(self.start, self.worker.training.division, directory)
            except BaseException:
                self.claim.release()
                raise

    def run(self) -> int:
        """Do this process's part; return the exit code."""
        try:
            return self._run()
        finally:
            if self.claim is not None:
                self.claim.release()

    def _run(self) -> int:
        strategy = build_strategy(self.config, self.world, self.worker)
        # Before any peer waits for this process.
        self.worker.get_ready(strategy.share_sizes())
        with _settled(), strategy:
            if not strategy.drives:
                strategy.serve()
                return 0
            run_dir, start = strategy.from_rank_zero((self.config.run_dir, self.start))
            config = with_values(self.config, run_dir=run_dir)
            return _Run(config, self.worker, strategy, start).run()


class _Run:
    """One training run, seen from a driving process."""

    def __init__(
        self, config: Config, worker: Worker, strategy: Strategy, start: dict[str, Any] | None
    ) -> None:
        """Begin anew, or where the checkpoint ``start`` ended."""
        self.config, self.worker, self.strategy = config, worker, strategy
        self.speaks = strategy.world.rank == 0
        assert config.run_dir is not None
        self.run_dir = Path(config.run_dir)
        initial = worker.learner.meta_parameters()
        self.optimizer = OuterOptimizer(
            config, {name: tensor.to(strategy.home) for name, tensor in initial.items()}
        )
        self.meta_params = self.optimizer.params
        self.iteration, self.seconds = 0, 0.0
        # Held while parameters, their optimizer, the iteration and the log do not belong together.
        self._between = threading.RLock()
        self._patience = Patience(lambda: worker.progress, speaks=self.speaks)
        if start is not None:
            self._restore(start)
        self.began_at = self.iteration
        if self.speaks:
            directory.write_config(
                self.run_dir,
                self.config,
                iteration=self.iteration,
                processes=strategy.world.size,
                device=str(worker.device),
            )
            if start is not None:
                checkpoint.continue_from(self.run_dir, start, is_last=config.resume == "auto")
        self.log = RunLog(self.run_dir, self.config)
        self.log.forget_after(self.iteration)

    def run(self) -> int:
        """Train to the end, or to a stop signal; return the exit code."""
        self.strategy.stop.install()
        config = self.config
        self._say(
            f"{config.preset}: strategy {config.strategy}, {self.strategy.world.size} process(es), "
            f"iterations {self.iteration} to {config.iterations}, run directory {self.run_dir}"
        )
        slow = why_no_kernels(config, self.worker)
        if slow is not None:
            self._say(f"not served by the compiled kernels, so slower than it might be: {slow}")
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
                    self._test()
                self._status("finished")
                return 0
            except _Stopped:
                self._save()
            return self._stopped(self.strategy.stopping)
        except BaseException:
            with contextlib.suppress(UserError):
                self._status("failed")
            raise
        finally:
            self.log.close()

    def _status(self, state: str) -> None:
        if self.speaks:
            directory.write_status(self.run_dir, state, self.iteration, self.began_at, self.config)

    def _stopped(self, by: str | None) -> int:
        """Say that the run was stopped, and has its checkpoint; return the exit code."""
        self._status("stopped")
        self._say(
            f"stopped by {by} after iteration {self.iteration}; checkpoint "
            f"{checkpoint.last_checkpoint(self.run_dir)}; the same command with "
            f"--run-dir {self.run_dir} continues"
        )
        return 130 if by == "SIGINT" else 143

    def _abandon(self, by: str) -> None:
        """Save the last whole iteration and end, while the main thread is in the middle of one."""
        with self._between:
            code = 1
            try:
                self._save()
                code = self._stopped(by)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(code)

    def _heed_stop(self) -> None:
        if self.strategy.stopping:
            self.strategy.stop.heed()
            raise _Stopped

    def _train(self) -> None:
        config = self.config
        window = _Window(self.worker.metric_names)
        episodes = self.worker.training
        bar = tqdm(
            total=config.iterations, initial=self.iteration, desc="training", unit="it",
            disable=not self.speaks, mininterval=0.5 if sys.stderr.isatty() else 15,
        )  # fmt: skip
        with bar:
            if self._owes_validation():
                self._validate(bar)
            while self.iteration < config.iterations and not self.strategy.stopping:
                began = time.perf_counter()
                self._patience.begin(self.iteration + 1)
                ids = episodes.ids(self.iteration, config.meta_batch_size)
                share = self.strategy.meta_step(self.meta_params, ids)
                with self._between:
                    self._step(share, began, window, bar)
                if self._due(config.checkpoint_every):
                    self._save()
                    self._status("training")
                if self._due(config.eval_every):
                    self._validate(bar)

    def _step(self, share: Share, began: float, window: _Window, bar: Any) -> None:
        """Step along the gradient that has come home; write the row that is due."""
        config = self.config
        self._patience.end()
        self.optimizer.step(share.gradients, share.n_tasks, self.iteration)
        self.iteration += 1
        took = time.perf_counter() - began
        self.seconds += took
        window.add(share, took)
        bar.update()
        if self.iteration % config.log_every and self.iteration != config.iterations:
            return
        row = window.row() | self.strategy.report()
        if not math.isfinite(row["loss"]):
            raise self._diverged(f"the loss is {row['loss']}")
        self.log.write({"iteration": self.iteration, **row, "seconds": self.seconds})
        bar.set_postfix(
            {name: f"{row[name]:.3f}" for name in self.worker.metric_names}
            | {"tasks/s": f"{row['tasks_per_second']:.0f}"},
            refresh=False,
        )
        window.clear()

    def _due(self, every: int) -> bool:
        return every > 0 and self.iteration % every == 0

    def _owes_validation(self) -> bool:
        """Say whether the run was stopped in the middle of this iteration's validation."""
        if not self.iteration or not self._due(self.config.eval_every):
            return False
        return not self.strategy.from_rank_zero(self.log.has(self.iteration, "validation"))

    def _validate(self, bar: Any) -> None:
        result = evaluate(
            self.strategy,
            self.meta_params,
            "validation",
            self.config.eval_tasks,
            between=self._heed_stop,
        )
        self.log.write({"iteration": self.iteration, **result, "seconds": self.seconds})
        if self.speaks:
            line = summary(result, self.config, self.config.transductive)
            bar.write(f"iteration {self.iteration}: {line}", file=sys.stderr)

    def _test(self) -> None:
        config = self.config
        tasks_per_second = None
        if self.seconds:
            tasks_per_second = self.iteration * config.meta_batch_size / self.seconds
        result: dict[str, Any] = {
            "accuracy": None, "ci95": None, "tasks": config.test_tasks,
            "transductive": config.transductive, "non_transductive_accuracy": None,
            "preset": config.preset, "published": config.published, "source": config.source,
            "changed": changed(config),
            "iterations": self.iteration, "seconds": self.seconds,
            "tasks_per_second": tasks_per_second,
        }  # fmt: skip
        if config.test_tasks:
            test = evaluate(
                self.strategy,
                self.meta_params,
                "test",
                config.test_tasks,
                progress=self.speaks,
                between=self._heed_stop,
            )
            result |= test
            headline = "" if config.transductive else "non_transductive_"
            for name in self.worker.metric_names:
                for key in (name, f"{name}_ci95"):
                    result[f"transductive_{key}"] = test[key]
                    result[key] = test[headline + key]
            result["ci95"] = result["accuracy_ci95" if "accuracy" in test else "loss_ci95"]
            self._say(summary(test, config, config.transductive))
        if self.speaks:
            directory.write_result(self.run_dir, result)
            plot = draw_curves(self.run_dir, config, result, self.worker, self.meta_params)
            self._say(f"run directory {self.run_dir}, plot {plot}")

    def _diverged(self, what: str) -> UserError:
        return UserError(
            f"{what} at iteration {self.iteration}: training has diverged; a smaller --meta-lr or "
            f"--inner-lr may help; the checkpoints in {self.run_dir} are from before"
        )

    def _save(self) -> None:
        if not all(tensor.isfinite().all() for tensor in self.meta_params.values()):
            raise self._diverged("parameters are not finite")
        if not self.speaks:
            return
        with self._between:
            checkpoint.save_in(
                self.run_dir,
                {
                    "model": {name: tensor.cpu() for name, tensor in self.meta_params.items()},
                    "optimizer": self.optimizer.state_dict(),
                    "iteration": self.iteration,
                    "seconds": self.seconds,
                    "strategy": self.strategy.state(),
                    "division": self.worker.training.division,
                    "config": {name: getattr(self.config, name) for name in MUST_MATCH},
                },
                keep=self.config.keep_checkpoints,
            )

    def _restore(self, saved: dict[str, Any]) -> None:
        for name, tensor in self.meta_params.items():
            tensor.copy_(saved["model"][name])
        try:
            self.optimizer.load_state_dict(saved["optimizer"])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise UserError(
                f"--resume {self.config.resume}: its optimizer is from another version of this "
                f"program ({error}); --resume never and another --run-dir begin anew"
            ) from error
        self.iteration, self.seconds = saved["iteration"], saved["seconds"]
        self.strategy.restore(saved.get("strategy", {}))

    def _say(self, text: str) -> None:
        if self.speaks:
            print(text, flush=True)


def why_no_kernels(config: Config, worker: Worker) -> str | None:
    """Return why compiled kernels do not serve this run; None where they do, or nobody would ask.

    Nobody asks without an inner loop, on a GPU, for what is no image, or where the flags say
    otherwise.
    """
    facts = registry.learner(config.learner)
    asked_otherwise = config.kernels != "auto" or config.meta_gradient == "reverse"
    if facts.tasks != "episodes" or asked_otherwise or worker.device.type != "cpu":
        return None
    return None if worker.learner.image_shape is None else worker.learner.obstacle(worker.device)


class _Window:
    """Sums over the iterations since the last row."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.clear()

    def clear(self) -> None:
        self._totals: Tensor | None = None
        self._count, self._seconds = 0, 0.0

    def add(self, share: Share, seconds: float) -> None:
        self._totals = share.totals if self._totals is None else self._totals + share.totals
        self._count += share.n_tasks
        self._seconds += seconds

    def row(self) -> dict[str, float]:
        """Return means over tasks by name, and tasks per second."""
        assert self._totals is not None
        means = (self._totals / self._count).tolist()
        return {
            **dict(zip(self._names, means, strict=True)),
            "tasks_per_second": self._count / self._seconds,
        }


class _Stopped(Exception):
    """A stop signal came: end in good order."""


@contextlib.contextmanager
def _settled() -> Iterator[None]:
    """Exempt what exists before the loop from garbage collection.

    Modules and data sets are a million objects, which stay; to walk through them takes a tenth of
    a second, and every process that is waited for does it at another time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
