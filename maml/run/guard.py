"""What is watched over at each step: that nothing is learned from what is no number, unheard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maml.config import Config
from maml.errors import UserError
from maml.params import Params
from maml.run import refused
from maml.run.divergence import Divergence

SKIPPED_IN_A_ROW = 100
"""Steps that may be skipped one after the other: no step will be taken after so many."""


class Guard:
    """Knows of each step of a run whether it was taken, and what its numbers were."""

    def __init__(
        self, config: Config, run_dir: Path, own_files: dict[str, dict[str, str]], *, speaks: bool
    ) -> None:
        """Guard the run of ``config``; all processes do, one of them ``speaks`` and writes.

        ``own_files``: `maml.run.provenance.own_files`, as the run has imported them.
        """
        self._config, self._run_dir, self._speaks = config, run_dir, speaks
        self._own_files = own_files
        self._divergence = Divergence()
        self._in_a_row = 0

    def taken(self, iteration: int, loss: float, peak: float, say: Callable[[str], None]) -> None:
        """Look at the step ``iteration``, which was taken; see `Divergence.look`."""
        self._in_a_row = 0
        self._look(iteration, loss, peak, say)

    def refuse(
        self,
        iteration: int,
        loss: float,
        reason: str,
        tasks: Tensor,
        model: Params,
        say: Callable[[str], None],
    ) -> None:
        """Write down a step that cannot be taken.

        Args:
            iteration: Its number, counted from 1.
            loss: Its mean loss.
            reason: What is not finite.
            tasks: ``[B]`` int64 ids of its training tasks.
            model: The meta-parameters before it.
            say: Takes a line for the user.

        Raises:
            UserError: if the run ends with it: after ``--on-nonfinite stop``, or when none of the
                last `SKIPPED_IN_A_ROW` steps could be taken; or if a file cannot be written.
        """
        self._in_a_row += 1
        action = self._config.on_nonfinite
        endless = self._in_a_row >= SKIPPED_IN_A_ROW
        if self._speaks:
            refused.record(
                self._run_dir,
                self._config,
                iteration=iteration,
                reason=reason,
                action=action,
                tasks=tasks,
                model=model,
                own_files=self._own_files,
            )
        what = f"{reason} at iteration {iteration}"
        replay = f"python -m maml.replay {self._run_dir} shows which tasks it is"
        if action == "skip" and not endless:
            if self._in_a_row == 1 and self._speaks:
                say(f"{what}: that step is skipped; {replay}")
            return self._look(iteration, loss, None, say)
        if endless:
            what += f", as at each of the last {SKIPPED_IN_A_ROW}"
        otherwise = "" if endless else "; --on-nonfinite skip goes on without such steps"
        raise UserError(
            f"{what}: training has diverged; that step was not taken; {replay}; a smaller "
            f"--meta-lr or --inner-lr may help{otherwise}"
        )

    def report(self, iteration: int) -> dict[str, Any]:
        """Return what result.json says of a run that ends after ``iteration``."""
        return {
            "diverged": self._divergence.verdict(),
            "skipped": refused.skipped(self._run_dir, iteration),
        }

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain numbers, for its checkpoint."""
        return self._divergence.state()

    def restore(self, state: dict[str, Any], home: torch.device) -> None:
        """Go on from what `state` returned."""
        self._divergence.restore(state)

    def _look(
        self, iteration: int, loss: float, peak: float | None, say: Callable[[str], None]
    ) -> None:
        for line in self._divergence.look(iteration, loss, peak):
            if self._speaks:
                say(line)
