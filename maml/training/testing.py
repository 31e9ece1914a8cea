"""The test at the end of a run, its result, and the pictures of both."""

from collections.abc import Callable
from typing import Any

from maml.config import registry
from maml.config.presets import changed, published_row
from maml.evaluation.scores import means, no_answers, of_tasks, summary, with_headline
from maml.library.model import Model
from maml.params import Params
from maml.plots import style
from maml.plots.curves import draw_curves
from maml.plots.tasks import panel
from maml.run.task_scores import drop_tasks, write_tasks
from maml.training.run import Run


def test(run: Run, tested: tuple[int, Params], heed_stop: Callable[[], None]) -> dict[str, Any]:
    """Evaluate the model of an iteration on the test split; return what result.json holds of it."""
    config, (iteration, params) = run.config, tested
    tasks_per_second = None
    if run.seconds:
        tasks_per_second = run.iteration * config.meta_batch_size / run.seconds
    result: dict[str, Any] = {
        "accuracy": None, "ci95": None, "tasks": config.test_tasks,
        "transductive": config.transductive, "non_transductive_accuracy": None,
        "preset": config.preset, **published_row(config),
        "changed": changed(config),
        "iterations": run.iteration,
        "tested_iteration": iteration if config.test_tasks else None,
        "seconds": run.seconds, "tasks_per_second": tasks_per_second,
    }  # fmt: skip
    if not config.test_tasks:
        if run.speaks:
            drop_tasks(run.dir)
        return result
    values = of_tasks(
        run.strategy, params, "test", config.test_tasks, progress=run.speaks, between=heed_stop
    )
    names = run.worker.evaluation_names
    scores = means(values, "test", names)
    if run.speaks:
        write_tasks(run.dir, "test", config.seed, names, values.tolist())
        if (images := run.worker.evaluation("test").content()) is not None:
            result["test_images"] = images
    run.write(scores)
    run.say(summary(scores, config, config.transductive))
    run.say(no_answers(scores))
    return result | with_headline(scores, transductive=config.transductive)


def draw(run: Run, tested: tuple[int, Params], result: dict[str, Any]) -> None:
    """Draw the run; hand the sink the curves, and a test task with its answers."""
    known = registry.learner(run.config.learner)
    iteration, params = tested
    curves = draw_curves(run.dir, run.config, result, run.worker, params)
    if run.log.has_sink:
        run.log.picture("pictures/curves", curves, run.iteration)
        if known.tasks == "episodes":
            drawn = panel(Model(run.worker.learner, params, iteration, run.worker.device))
            if drawn is not None:
                path = style.save(drawn, run.dir / "task", pdf=False)
                run.log.picture("pictures/task", path, run.iteration)
    run.say(f"run directory {run.dir}, plot {curves}")
