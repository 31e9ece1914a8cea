"""A learner that takes its time, so that its training can be interrupted on a fast machine, too."""

import time

from maml.learners.maml import MAML
from maml.metagradient.problem import Problem
from maml.params import Params


class Slow(MAML):
    """MAML with 30 ms in each step."""

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """State it late."""
        time.sleep(0.03)
        return super().problem(meta_params, steps)
