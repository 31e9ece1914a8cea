"""No adaptation: what a network that has seen no support set makes of a task."""

from maml.learners.base import Learner
from maml.metagradient.problem import Problem
from maml.params import Params

COMPONENTS = {
    "noadapt": {
        "attribute": "NoAdaptation",
        "adapts_at_test": False,
        "help": "one set of weights for all tasks, that never adapts",
        "reads": ("shots", "queries", "eval_queries"),
    }
}


class NoAdaptation(Learner):
    """The weights of least query loss over all tasks, taken as they are at test.

    The floor under every learner that adapts (as in arXiv:1703.03400, section 5.1, where it answers
    every sinusoid alike). Labels of a few-shot classification are drawn anew for each task, so all
    that it can do there is to guess: 1 / N.
    """

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """No inner step, however many are asked for."""
        weights = self.network_weights(meta_params)
        return Problem(start={}, fixed=weights, **self.stated_losses(), steps=0)
