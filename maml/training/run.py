"""One training run, seen from a driving process: what its companions share."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

from maml.config import Config
from maml.metagradient.outer_optimizer import NotFiniteError, OuterOptimizer
from maml.params import Params
from maml.run.log import RunLog
from maml.strategies import Strategy
from maml.worker import Share


class Run:
    """A run's parameters, their optimizer, and how far they have come.

    Attributes:
        config, strategy, worker: As the run was set up.
        dir: The run directory.
        speaks: Whether this process is rank 0, which prints and writes files.
        log: The rows of metrics.jsonl.
        params: The meta-parameters by name, on the strategy's home; changed in place.
        iteration: Steps so far, those that were skipped included.
        seconds: That these took.
        changing: Held while parameters, iteration, log and checkpoint do not belong together.
        is_whole: Whether parameters, optimizer and iteration belong together.
    """

    log: RunLog

    def __init__(self, config: Config, strategy: Strategy, initial: Params | None) -> None:
        """Begin with the ``initial`` weights; None: with those that the seed draws."""
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
        self.changing, self.is_whole = threading.RLock(), True

    def say(self, text: str) -> None:
        """Print a line, on rank 0; "" prints none."""
        if self.speaks and text:
            print(text, flush=True)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row of this iteration to metrics.jsonl."""
        self.log.write({"iteration": self.iteration, **row, "seconds": self.seconds})

    def is_due(self, every: int) -> bool:
        """Say whether this iteration is one of each ``every``; 0 is never."""
        return every > 0 and self.iteration % every == 0

    def step(self, share: Share, loss: float) -> None:
        """Take an outer step along the mean gradient of ``share``, whose mean loss is ``loss``.

        Every driving process holds the same sums, so all decide the same. `count` follows.

        Raises:
            NotFiniteError: if the step cannot be taken; all is as it was.
        """
        if not math.isfinite(loss):
            raise NotFiniteError(f"the loss is {loss}")
        self.is_whole = False
        try:
            with self.worker.stopwatch.spent_on("updating"):
                self.optimizer.step(share.gradients, share.n_tasks, self.iteration)
        except NotFiniteError:
            self.is_whole = True
            raise

    def count(self, seconds: float) -> None:
        """Count one iteration, which took so many seconds."""
        self.iteration, self.is_whole = self.iteration + 1, True
        self.seconds += seconds

    def content(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {
            "model": {name: tensor.cpu() for name, tensor in self.params.items()},
            "optimizer": self.optimizer.state_dict(),
            "iteration": self.iteration,
            "seconds": self.seconds,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint's content."""
        for name, tensor in self.params.items():
            tensor.copy_(saved["model"][name])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.iteration, self.seconds = saved["iteration"], saved["seconds"]
