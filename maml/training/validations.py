"""A run's validations: what they find is logged, and the best model kept where that is tested."""

import sys
from collections.abc import Callable
from typing import Any

from maml.evaluation.best import BestModel
from maml.evaluation.scores import evaluate, summary
from maml.params import Params
from maml.run.files import read_rows
from maml.run.insight import inner_loop
from maml.training.run import Run


class Validations:
    """Validates a run, in every driving process.

    Attributes:
        best: The model that validated best, if ``--test-model best`` asks for it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.best = BestModel(transductive=run.config.transductive)

    def recall(self) -> bool:
        """Count a validation that came after this iteration's checkpoint; return if there is one.

        Where it is due and missing, the run was stopped in the middle of it.
        """
        run = self._run
        rows = read_rows(run.dir / "metrics.jsonl") if run.speaks else []
        validated = (row for row in rows if row.get("split") == "validation")
        here = (row for row in validated if row["iteration"] == run.iteration)
        found = run.strategy.from_rank_zero(next(here, None))
        if found is not None:
            self._offer(found)
        return found is not None

    def validate(self, bar: Any, heed_stop: Callable[[], None]) -> None:
        """Validate; ``heed_stop`` is called now and then."""
        run, config = self._run, self._run.config
        result = evaluate(
            run.strategy, run.params, "validation", config.eval_tasks, between=heed_stop
        )
        self._offer(result)
        if run.speaks:
            result |= inner_loop(run.worker, run.params)
        run.write(result)
        if run.speaks:
            line = summary(result, config, config.transductive)
            bar.write(f"iteration {run.iteration}: {line}", file=sys.stderr)

    def _offer(self, validation: dict[str, Any]) -> None:
        run = self._run
        if run.config.test_model == "best":
            with run.changing:
                self.best.offer(validation, run.iteration, run.params)

    @property
    def enough(self) -> bool:
        """Whether the last ``--stop-after`` validations have found no better model."""
        run, config, best = self._run, self._run.config, self.best.iteration
        if not config.stop_after or best is None:
            return False
        return run.iteration - best >= config.stop_after * config.eval_every

    def chosen(self) -> tuple[int, Params]:
        """Return what is tested: the iteration and the parameters."""
        if self.best.iteration is None:
            return self._run.iteration, self._run.params
        return self.best.iteration, self.best.model
