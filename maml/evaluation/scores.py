"""Scores of a strategy's parameters on a split: means and intervals over tasks."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from datasets.checked import shared_classes
from datasets.words import counted
from maml.config import Config, registry
from maml.errors import UserError
from maml.params import Params
from maml.run.progress import bar
from maml.strategies import Strategy
from maml.strategies.local import Local
from maml.worker import Worker


def there_are(tasks: int, worker: Worker, split: str) -> int:
    """Return how many of ``tasks`` there are in ``split``: examples run out, episodes do not."""
    return min(tasks, worker.evaluation(split).one_pass or tasks)


def same_classes(worker: Worker, splits: Sequence[str]) -> str:
    """Return a warning where ``splits`` have classes of the training split, or of one another."""
    config = worker.config
    new = "images" if registry.learner(config.learner).tasks == "batches" else "classes"
    opened = [worker.training, *map(worker.evaluation, splits)]
    return shared_classes(config.data, opened, new)


def check_headline(worker: Worker, split: str, transductive: bool, flag: str) -> str:
    """Return a warning where the number beside the headline is not what it is called, or "".

    Args:
        worker: Who evaluates.
        split: Whose tasks.
        transductive: Whether that is the headline.
        flag: What asks for the other one, for the message.

    Raises:
        UserError: where the headline is to be non-transductive, and the network has no such number.
    """
    reason = worker.why_transductive(split)
    if reason is None:
        return ""
    if not transductive:
        raise UserError(f"{flag}: {reason}, so it has no non-transductive number")
    return f"warning: {reason}: the numbers called non-transductive are transductive, too"


def evaluate(
    strategy: Strategy,
    meta_params: Params,
    split: str,
    tasks: int,
    *,
    progress: bool = False,
    between: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the `means` of what `of_tasks` returns, for the same arguments."""
    values = of_tasks(strategy, meta_params, split, tasks, progress=progress, between=between)
    return means(values, split, strategy.worker.evaluation_names)


def of_tasks(
    strategy: Strategy,
    meta_params: Params,
    split: str,
    tasks: int,
    *,
    progress: bool = False,
    between: Callable[[], None] = lambda: None,
) -> Tensor:
    """Evaluate tasks 0 … ``tasks`` − 1 of ``split``; call ``between`` between rounds of some.

    Where examples run out, it ends: to see them twice would narrow the interval for nothing.

    Returns:
        ``[tasks, len(evaluation_names)]``: each task's metrics.
    """

    def evaluated(ids: Tensor) -> Tensor:
        between()
        return strategy.evaluate(meta_params, split, ids)

    return in_rounds(strategy, split, tasks, evaluated, progress=progress)


def ensemble(
    strategy: Local, models: Sequence[Params], split: str, tasks: int, *, progress: bool = False
) -> dict[str, Any]:
    """Return what `evaluate` does, of an ensemble (`maml.learners.asked`)."""
    worker = strategy.worker

    def evaluated(ids: Tensor) -> Tensor:
        return worker.evaluate_together(models, split, ids, worker.learner)

    values = in_rounds(strategy, split, tasks, evaluated, progress=progress)
    return means(values, split, worker.evaluation_names)


def in_rounds(
    strategy: Strategy,
    split: str,
    tasks: int,
    evaluated: Callable[[Tensor], Tensor],
    *,
    progress: bool,
) -> Tensor:
    """Return the rows of ``evaluated`` of all tasks that there are, a round of ids at a time."""
    config = strategy.config
    tasks = there_are(tasks, strategy.worker, split)
    # Rounds small enough to show progress and to answer a stop signal between two.
    round_size = max(config.task_batch, 4) * strategy.world.size
    rows = []
    with bar(tasks, split, "task", speaks=progress, leave=False) as shown:
        for ids in torch.arange(tasks).split(round_size):
            rows.append(evaluated(ids))
            shown.update(len(ids))
    return torch.cat(rows)


def means(values: Tensor, split: str, names: Sequence[str]) -> dict[str, Any]:
    """Return what metrics of tasks ``values [T, len(names)]`` come to.

    Returns:
        ``tasks``, ``split`` and, for every name, its mean over tasks and ``<name>_ci95``, the
        half-width 1.96·σ/√tasks (Finn et al. 2017, table 1).
    """
    result: dict[str, Any] = {"split": split, "tasks": len(values)}
    for name, column in zip(names, values.T, strict=True):
        result[name], result[f"{name}_ci95"] = mean_and_ci95(column)
    return result


def with_headline(test: dict[str, Any], *, transductive: bool) -> dict[str, Any]:
    """Return what `means` has found, named as a run's ``result.json`` names it.

    Each metric as the run's headline has it, transductive or not, with ``transductive_<name>`` and
    ``non_transductive_<name>`` beside it, and ``ci95``, the half-width of what it is judged by.
    """
    prefix = "" if transductive else "non_transductive_"
    names = [name for name in test if f"{name}_ci95" in test]
    found = dict(test)
    for name in names:
        if not name.startswith("non_transductive_"):
            for key in (name, f"{name}_ci95"):
                found[f"transductive_{key}"], found[key] = test[key], test[prefix + key]
    return found | {"ci95": found[f"{headline(test)}_ci95"]}


def summary(result: dict[str, Any], config: Config, transductive: bool) -> str:
    """Say a result in one line, both ways of normalising the queries included."""
    metric = headline(result)
    unit, scale = (" %", 100.0) if metric == "accuracy" else ("", 1.0)

    def shown(prefix: str) -> str:
        mean, ci95 = result[f"{prefix}{metric}"], result[f"{prefix}{metric}_ci95"]
        interval = "?" if ci95 is None else f"{scale * ci95:.2f}"
        return f"{scale * mean:.2f} ± {interval}{unit}"

    first, second = ("", "non_transductive_") if transductive else ("non_transductive_", "")
    names = {"": "transductive", "non_transductive_": "non-transductive"}
    both = f"{shown(first)} ({names[first]}), {shown(second)} ({names[second]})"
    if metric != "accuracy":
        both = shown("")
    over = "mean ± 95 % interval over"
    tasks, steps = result["tasks"], counted(config.eval_inner_steps, "inner step")
    queries = counted(config.eval_queries, "query", "queries")
    if registry.learner(config.learner).tasks == "batches":
        five = f"precision@5 {100 * result[first + 'precision@5']:.2f} %"
        return (
            f"{result['split']} {metric} {both}, {five}: {over} "
            f"{counted(tasks, 'batch', 'batches')} of {counted(config.batch_size, 'example')}"
        )
    if metric == "return":
        before = f", {result['return_before']:.2f} before" if "return_before" in result else ""
        adapted = f", {steps} of {counted(config.shots, 'episode')} each"
        return (
            f"{result['split']} return {both}{before}: {over} {counted(tasks, 'task')}, "
            f"{counted(config.eval_queries, 'episode')} each{adapted if before else ''}"
        )
    examples = f"{config.ways}-way {config.shots}-shot, {queries} per class"
    if metric == "loss":
        examples = f"{config.shots}-shot, {queries}"
    if registry.learner(config.learner).adapts_at_test:
        examples = f"{examples}, {steps}"
    over = f"{over} {counted(tasks, 'task')}"
    return f"{result['split']} {metric} {both}: {over}, {examples}"


def headline(scores: Container[str]) -> str:
    """Return which of a result's ``scores`` it is judged by: the greater the better, but a loss."""
    return next(name for name in ("accuracy", "return", "loss") if name in scores)


def has_answers(scores: Mapping[str, Any]) -> bool:
    """Say whether the losses among a result's ``scores`` are finite.

    Where they are not, the model's answers are no numbers, and an accuracy of 0 ± 0 tells nothing.
    """
    return all(math.isfinite(scores[name]) for name in scores if name.endswith("loss"))


def no_answers(result: Mapping[str, Any]) -> str:
    """Return a warning where a result of `means` is of answers that tell nothing, or ""."""
    split = result["split"]
    if not has_answers(result):
        return f"warning: the {split} loss is not finite: the model's answers are no numbers"
    if result.get("accuracy_ci95") == 0 and result["accuracy"] < 0.9:
        return (
            f"warning: all {split} tasks have the same accuracy: the model gives one answer to all "
            "queries; try a smaller --inner-lr, or fewer --eval-inner-steps"
        )
    return ""


def mean_and_ci95(values: Tensor) -> tuple[float, float | None]:
    """Return the mean of per-task ``values [T]`` and 1.96·σ/√T (σ: sample deviation over tasks).

    One task has no interval: None.
    """
    values = values.to(torch.float64)
    if len(values) < 2:
        return values.mean().item(), None
    return values.mean().item(), (1.96 * values.std() / len(values) ** 0.5).item()
