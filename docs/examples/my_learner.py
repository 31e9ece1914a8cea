"""Your own learner: a subclass of a learner in ``maml.learners``."""

import dataclasses

from maml.learners.maml import MAML


class Slower(MAML):
    """MAML whose inner steps grow shorter, and whose support loss keeps the weights small."""

    def problem(self, meta_params, steps):
        problem = super().problem(meta_params, steps)
        rates = [
            {name: weight.new_tensor(0.5**step) for name, weight in problem.start.items()}
            for step in range(steps)
        ]
        return dataclasses.replace(problem, rates=rates)

    def support_loss(self, params, task, step):
        loss, outputs = super().support_loss(params, task, step)
        size = sum(weight.square().sum() for weight in params.values())
        return loss + 1e-4 * size, outputs
