"""What a run leaves to go on from: its checkpoints and its status."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from maml.config import OF_A_CHECKPOINT
from maml.errors import UserError
from maml.evaluation.best import best
from maml.run import checkpoint, directory
from maml.run.provenance import warn_of_edits
from maml.run.resume import bring_history
from maml.training.run import Run


class Companion(Protocol):
    """A part of a run whose own state is in the checkpoints."""

    def state(self) -> dict[str, Any]:
        """Return plain containers and tensors."""

    def restore(self, state: dict[str, Any], home: torch.device) -> None:
        """Go on from what `state` returned; empty, as of an earlier version: begin anew."""


class Keeper:
    """Saves a run and its companions; rank 0 writes, every driving process checks."""

    def __init__(
        self, run: Run, companions: Mapping[str, Companion], own: dict[str, dict[str, str]]
    ) -> None:
        """``companions``: by their names in a checkpoint; ``own``: files of a user's own."""
        self._run, self._companions = run, companions
        self._fixed: dict[str, Any] = {
            "division": run.worker.training.division,
            "own_files": own,
            "config": {name: getattr(run.config, name) for name in OF_A_CHECKPOINT},
        }
        self._saved, self._began_at = -1, 0
        self.last = checkpoint.last_checkpoint(run.dir)

    def begin(self, start: dict[str, Any] | None) -> None:
        """Bring the run to where the checkpoint ``start`` ended; write what it begins with."""
        run = self._run
        if start is not None:
            run.restore(start)
            for name, companion in self._companions.items():
                companion.restore(start.get(name, {}), run.strategy.home)
            self._saved = self._began_at = run.iteration
        if not run.speaks:
            return
        warn_of_edits(run.config, start or {})
        self._fixed["starts"] = directory.write_config(
            run.dir,
            run.config,
            iteration=run.iteration,
            processes=run.strategy.world.size,
            threads=torch.get_num_threads(),
            device=str(run.worker.device),
            begun=start.get("starts", []) if start else [],
        )
        if start is not None:
            bring_history(run.dir, run.config)
            checkpoint.continue_from(run.dir, start, is_last=run.config.resume == "auto")

    def status(self, what: str) -> None:
        """Write status.json."""
        run = self._run
        if run.speaks:
            directory.write_status(run.dir, what, run.iteration, self._began_at, run.config)

    def save(self) -> None:
        """Write a checkpoint.

        Raises:
            UserError: if the parameters are not finite: they are never saved; or a file cannot be
                written.
        """
        run = self._run
        if not run.optimizer.is_finite():
            before = f"{self.last} is from before" if self.last.exists() else "none is saved"
            raise UserError(
                f"parameters are not finite after iteration {run.iteration}: training has "
                f"diverged; {before}; a smaller --meta-lr may help"
            )
        if not run.speaks:
            return
        with run.changing:
            # First: a status is never behind a checkpoint, whenever this process is killed. Where
            # it cannot be written, that is no reason not to save.
            with contextlib.suppress(UserError):
                self.status("training")
            parts = {name: companion.state() for name, companion in self._companions.items()}
            stays: list[int] = []
            if run.config.keep_best:
                there = checkpoint.numbered_checkpoints(run.dir)
                stays = best(run.dir, there, transductive=run.config.transductive)
            checkpoint.save_in(
                run.dir,
                run.content() | parts | self._fixed,
                keep=run.config.keep_checkpoints,
                best=stays[: run.config.keep_best],
            )
            self._saved = run.iteration

    def before(self, error: UserError) -> UserError:
        """Save the state before a step that ends the run; return the error that names the file."""
        try:
            self.save()
        except UserError as other:
            return UserError(f"{error}; and {other}")
        return UserError(f"{error}; {self.last} is from before that step")

    def rescue(self) -> None:
        """Save the last whole iteration of a run that fails, if that can be done."""
        run = self._run
        if run.speaks and run.is_whole and run.iteration > self._saved:
            with contextlib.suppress(UserError):
                self.save()
                run.say(f"saved after iteration {run.iteration}: {self.last}")
