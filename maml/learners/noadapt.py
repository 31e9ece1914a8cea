"""No adaptation: a network answers a task's queries without its support set."""

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
    """The weights with the least query loss over all tasks. Tests use them without adaptation.

    This is the baseline that every learner that adapts must beat (as in arXiv:1703.03400, section
    5.1, where its output is the same for every sinusoid). Few-shot classification draws labels
    anew for each task, so this learner can only guess there: accuracy 1 / N.
    """

    def problem(self, meta_params: Params, steps: int) -> Problem:
        """Return a problem without inner steps, for any ``steps``: all tasks share all weights."""
        fixed = {name.removeprefix("network."): p for name, p in meta_params.items()}
        return Problem(start={}, fixed=fixed, **self.stated_losses(), steps=0)
