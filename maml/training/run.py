"""One training run in a driving process: its parameters, checkpoints and log."""

import contextlib
import functools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maml.config.fields import OF_A_CHECKPOINT, Config
from maml.errors import UserError
from maml.evaluation.best import best
from maml.metagradient.outer_optimizer import NotFiniteError, OuterOptimizer
from maml.params import Params
from maml.run import checkpoint, directory
from maml.run.log import RunLog
from maml.run.provenance import own_files, warn_of_edits
from maml.strategies.base import Strategy
from maml.training.initial import bring_history
from maml.worker import Share


class Run:
    """A run's parameters, their optimizer, and how far they have come.

    Rank 0 prints and writes files; every driving process checks.

    Attributes:
        params: The meta-parameters by name, on the strategy's home; changed in place.
        iteration: Steps so far, including skipped steps; they took ``seconds``.
        changing: A lock, held while parameters, iteration, log and checkpoint do not agree.
    """

    log: RunLog

    def __init__(self, config: Config, strategy: Strategy, initial: Params | None) -> None:
        """Begin with the ``initial`` weights, else with those that the seed draws."""
        self.config, self.strategy, self.worker = config, strategy, strategy.worker
        self.dir, self.speaks = Path(config.run_dir or ""), strategy.world.rank == 0
        initial = initial or self.worker.learner.meta_parameters()
        self.optimizer = OuterOptimizer(
            config,
            {name: tensor.to(strategy.home) for name, tensor in initial.items()},
            [f"network.{name}" for name in self.worker.learner.frozen],
        )
        self.params = self.optimizer.params
        self.iteration, self.seconds = 0, 0.0
        self.changing, self._is_whole = threading.RLock(), True
        self.last, self._saved = checkpoint.last_checkpoint(self.dir), -1
        self._companions: Mapping[str, Any] = {}
        # The steps since the row before: seconds and, if taken, sums and number of tasks.
        self._since: list[tuple[float, tuple[Tensor, int] | None]] = []
        self._fixed: dict[str, Any] = {
            "division": self.worker.training.division,
            # Read now, as they were imported: a user may edit the files while the run trains.
            "own_files": own_files(config),
            "config": {name: getattr(config, name) for name in OF_A_CHECKPOINT},
        }

    def begin(self, start: dict[str, Any] | None, companions: Mapping[str, Any]) -> None:
        """Go on from the checkpoint ``start``, which has the states of the named companions.

        A companion is a part of the run that has the methods ``state`` and ``restore``.
        """
        self._companions = companions
        if start is not None:
            for name, tensor in self.params.items():
                tensor.copy_(start["model"][name])
            self.optimizer.load_state_dict(start["optimizer"])
            self.iteration, self.seconds = start["iteration"], start["seconds"]
            for name, companion in companions.items():
                companion.restore(start.get(name, {}), self.strategy.home)
            self._saved = self.iteration
        if not self.speaks:
            return
        warn_of_edits(self.config, start or {})
        if start is not None:
            bring_history(self.dir, self.config)
            # A run that continues from another directory has no own checkpoints yet.
            if checkpoint.is_begun(self.dir):
                checkpoint.save_in(self.dir, start)
                # Later checkpoints are from an abandoned continuation: they would count as ours.
                checkpoint.remove(self.dir, lambda iteration: iteration > self.iteration)
        # Last, because `directory.is_restart` tells by config.yaml that all this is done.
        self._fixed["starts"] = directory.write_config(
            self.dir, self.config, start.get("starts", []) if start else [],
            device=str(self.worker.device), iteration=self.iteration,
            processes=self.strategy.world.size, threads=torch.get_num_threads(),
        )  # fmt: skip

    def say(self, text: str) -> None:
        """Print a line, on rank 0; "" prints nothing."""
        if self.speaks and text:
            print(text, flush=True)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row of this iteration to metrics.jsonl."""
        self.log.write({"iteration": self.iteration, **row, "seconds": self.seconds})

    def status(self, what: str) -> None:
        """Write status.json."""
        if self.speaks:
            directory.write_status(self.dir, what, self.iteration)

    def is_due(self, every: int) -> bool:
        """Return whether this iteration is a multiple of ``every``; 0 means never."""
        return every > 0 and self.iteration % every == 0

    def step(self, share: Share) -> float:
        """Take an outer step along the mean gradient of ``share``; return its mean loss.

        Every driving process holds the same sums, so all decide the same. The caller then calls
        `count`. After a NotFiniteError nothing has changed.
        """
        self._is_whole = False
        try:
            with self.worker.stopwatch.spent_on("updating"):
                return self.optimizer.step(
                    share.gradients, share.n_tasks, self.iteration, share.totals[0]
                )
        except NotFiniteError:
            self._is_whole = True
            raise

    def count(self, share: Share | None, seconds: float) -> None:
        """Count one iteration, which took ``seconds``; ``share`` is None if it was skipped."""
        self.iteration, self._is_whole = self.iteration + 1, True
        self.seconds += seconds
        # A copy, because the sums may be part of one tensor with the gradients.
        sums = None if share is None else (share.totals.clone(), share.n_tasks)
        self._since.append((seconds, sums))

    def report(self) -> dict[str, Any]:
        """Write a row of the iterations since the row before, and return it; {} without any.

        The numbers of a skipped step would spoil the means, so only the step counts.
        """
        since, self._since = self._since, []
        if not since:
            return {}
        taken = [sums for _, sums in since if sums is not None]
        n_tasks, seconds = sum(n for _, n in taken), sum(took for took, _ in since)
        row: dict[str, Any] = {}
        if taken:
            totals = functools.reduce(torch.add, (each for each, _ in taken))
            row |= zip(self.worker.metric_names, (totals / n_tasks).tolist(), strict=True)
        row["tasks_per_second"] = n_tasks / seconds
        if skipped := len(since) - len(taken):
            row["skipped"] = skipped
        spent = self.worker.stopwatch.take()
        # The remaining time goes to messages and to waiting for other processes.
        elsewhere = max(0.0, seconds - sum(spent.values()))
        row |= self.strategy.report() | {"time": spent | {"elsewhere": elsewhere}}
        self.write(row | {"gradient_norm": self.optimizer.norm})
        return row

    def content(self) -> dict[str, Any]:
        """Return the run's part of a checkpoint, without its companions."""
        return {
            "model": {name: tensor.cpu() for name, tensor in self.params.items()},
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
            "seconds": self.seconds,
            **self._fixed,
        }

    def save(self) -> None:
        """Write a checkpoint; raise UserError, and save nothing, if parameters are not finite."""
        if not self.optimizer.is_finite():
            before = f"{self.last} is from before" if self.last.exists() else "none is saved"
            raise UserError(
                f"parameters are not finite after iteration {self.iteration}: training has "
                f"diverged; {before}; a smaller --meta-lr may help"
            )
        if not self.speaks:
            return
        with self.changing:
            # Save the checkpoint even if one of these cannot be written. A row now, so that a run
            # which goes on from the checkpoint has no sums without a row. The status before the
            # checkpoint, so that it is never behind, even after a kill.
            with contextlib.suppress(UserError):
                self.report()
            with contextlib.suppress(UserError):
                self.status("training")
            parts = {name: companion.state() for name, companion in self._companions.items()}
            checkpoint.save_in(self.dir, self.content() | parts)
            there = list(checkpoint.numbered_checkpoints(self.dir))
            stay = set(there[-self.config.keep_checkpoints :])
            if self.config.keep_best:
                found = best(self.dir, there, transductive=self.config.transductive)
                stay |= set(found[: self.config.keep_best])
            checkpoint.remove(self.dir, lambda iteration: iteration not in stay)
            self._saved = self.iteration

    def save_before(self, error: UserError) -> UserError:
        """Save the state before a step that ends the run; return the error that names the file."""
        try:
            self.save()
        except UserError as other:
            return UserError(f"{error}; and {other}")
        return UserError(f"{error}; {self.last} is from before that step")

    def rescue(self) -> None:
        """Save the last whole iteration of a run that fails, if possible."""
        if self.speaks and self._is_whole and self.iteration > self._saved:
            with contextlib.suppress(UserError):
                self.save()
                self.say(f"saved after iteration {self.iteration}: {self.last}")
