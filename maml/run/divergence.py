"""Divergence that is no NaN yet: a loss that stays far above where it began, a gradient like none.

A network whose weights are far away answers nonsense with finite numbers, for as many iterations as
it is given.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

FAR = 4.0
"""How many times the loss that it began with a loss is that counts as far above it."""

LONG = 100
"""Iterations that are looked at; the loss is far above for long if it is so in most of them."""

HUGE = 1e4
"""How many times the largest element of all gradients before it one is that deserves a line."""

SETTLED = 10
"""Steps after which there is a largest element to compare with."""


class Divergence:
    """Looks at the loss and the gradient of each step of a run."""

    def __init__(self) -> None:
        self._beginning: float | None = None
        self._far: deque[bool] = deque(maxlen=LONG)
        self._loss = math.nan
        self._largest, self._steps = 0.0, 0
        self._said: set[str] = set()

    def look(self, iteration: int, loss: float, peak: float | None) -> list[str]:
        """Take a step's numbers; return what there is to say about them, each thing once.

        Args:
            iteration: Its number, counted from 1.
            loss: The mean loss of its tasks, before the step.
            peak: The largest magnitude in its gradient; None if the step was not taken.
        """
        if math.isfinite(loss):
            self._beginning = loss if self._beginning is None else self._beginning
            self._loss = loss
        self._far.append(self._is_far(loss))
        said = []
        if len(self._far) == LONG and self.far():
            said += self._once(
                "loss",
                f"the loss is {loss:.3g} at iteration {iteration} and began with "
                f"{self._beginning:.3g}: for {LONG} iterations it has mostly been more than "
                f"{FAR:g} times that, so training has diverged; a smaller --meta-lr or --inner-lr "
                "may help",
            )
        if peak is not None:
            if self._steps >= SETTLED and peak > HUGE * self._largest > 0:
                said += self._once(
                    "gradient",
                    f"the gradient of iteration {iteration} has an element of {peak:.3g}, where "
                    f"{self._largest:.3g} was the largest before: adam will hardly move such a "
                    "weight for thousands of iterations; --grad-clip bounds it",
                )
            self._largest, self._steps = max(self._largest, peak), self._steps + 1
        return said

    def far(self) -> bool:
        """Whether most of the last `LONG` losses, or of all if they are fewer, are far above."""
        return 2 * sum(self._far) > len(self._far)

    def verdict(self) -> dict[str, float] | None:
        """Return, for result.json, how a run ends that has diverged; None for one that has not."""
        if not self.far() or self._beginning is None:
            return None
        return {"loss": self._loss, "beginning": self._beginning}

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs: plain numbers, for its checkpoint."""
        return {
            "beginning": self._beginning,
            "far": list(self._far),
            "loss": self._loss,
            "largest": self._largest,
            "steps": self._steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned; empty, of an earlier version: begin here."""
        if state:
            self._beginning, self._loss = state["beginning"], state["loss"]
            self._far.extend(state["far"])
            self._largest, self._steps = state["largest"], state["steps"]

    def _is_far(self, loss: float) -> bool:
        """A loss that began below zero has no scale of its own: nothing is said of it."""
        if not math.isfinite(loss):
            return True
        return self._beginning is not None and 0 < FAR * self._beginning < loss

    def _once(self, what: str, line: str) -> list[str]:
        if what in self._said:
            return []
        self._said.add(what)
        return [line]
