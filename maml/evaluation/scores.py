"""Scores of a strategy's parameters on a split: means and intervals over tasks."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor

from datasets.batches import Batches
from datasets.checked import shared_classes
from datasets.components import is_theirs
from datasets.environments.acting import Acting
from datasets.episodes import FewShotImages
from datasets.tasks import Task
from datasets.words import counted
from maml.config import Config, registry
from maml.errors import UserError
from maml.learners import Learner
from maml.learners.data import training_task
from maml.learners.objectives import Predictions, is_taken
from maml.metagradient import draws
from maml.metagradient.by_task import one_by_one
from maml.params import Params
from maml.run.files import headline
from maml.run.progress import bar
from maml.strategies.base import Strategy
from maml.worker import Worker

OURS = ("accuracy", "return", "return_before", "episodes", "precision@1", "precision@5")
"""The metrics of our own learners; a `summary` shows each other metric under its name."""


def there_are(tasks: int, worker: Worker, split: str) -> int:
    """Return ``tasks``, or the size of one pass over ``split`` if that is smaller."""
    return min(tasks, worker.evaluation(split).one_pass or tasks)


def check_own_data(worker: Worker, splits: Sequence[str], *, trains: bool) -> list[str]:
    """Return warnings about a user's own data, in training and in ``splits``.

    Splits should share no class. Task 0 of `Episodes` should be another one than in training, and
    of the sizes that the flags say. Raise UserError if it differs at each call.
    """
    config, lines, same, trained = worker.config, list[str](), list[str](), list[Any]()
    if not (is_theirs(config.data) or registry.data_set(config.data).own_images):
        return []
    opened = [(worker.training, *training_task(config), config.queries)] if trains else []
    for split in splits:
        opened.append((worker.evaluation(split), config.ways, config.shots, config.eval_queries))
    per_class = "accuracy" in worker.learner.metric_names
    for episodes, *sizes in opened:
        if isinstance(episodes, (Acting, Batches, FewShotImages)):
            continue  # the tasks are ours
        what = f"--data {config.data}: {episodes.split} task 0"
        made, again = (episodes.tasks(torch.arange(1)) for _ in range(2))
        (task,), bits = one_by_one(made), _bits(made)
        if bits != _bits(again):
            must = "a task must depend on (seed, split, id) only"
            raise UserError(f"{what} differs at each call: {must}")
        if trains and episodes is worker.training:
            trained = bits
        elif bits[:2] == trained[:2] and task.support_x.numel():  # queries may differ in number
            same.append(episodes.split)
        if not lines and (other := _other_sizes(task, *sizes, per_class=per_class)):
            lines = [f"warning: {what} has {other}"]
    if same:
        line = f"task 0 of {' and '.join(same)} has the support set of train task 0, bit for bit"
        nothing = "the results there say nothing about new tasks"
        lines.insert(0, f"warning: --data {config.data}: {line}: {nothing}")
    new = "images" if registry.learner(config.learner).tasks == "batches" else "classes"
    return [shared_classes(config.data, [episodes for episodes, *_ in opened], new), *lines]


def _bits(made: Any) -> list[Any]:
    (task,) = one_by_one(made)
    return [(part.shape, part.cpu().numpy().tobytes()) for part in task]


def _other_sizes(task: Task, ways: int, shots: int, queries: int, *, per_class: bool) -> str:
    """Say how a task ``[1, E, …]`` differs in size from what the flags say, or ""."""
    said, classes = f"{shots}-shot, {counted(queries, 'query', 'queries')}", 1
    if per_class:
        said, classes = f"{ways}-way {said} per class", ways
    has, flags = (
        f"{support} support and {query} query examples"
        for support, query in (
            (task.support_y.shape[1], task.query_y.shape[1]),
            (classes * shots, classes * queries),
        )
    )
    return "" if has == flags else f"{has}; the flags say {said}: {flags}"


def check_answers(learner: Learner) -> str:
    """Return a warning if a user's own outer loss has no part in the answers at test, else ""."""
    name = learner.config.learner
    theirs = [n for n in ("query_loss", "set_loss") if not learner.inherits(n)]
    answered = not all(map(learner.inherits, ("answers", "call_network", "loss")))
    if not is_theirs(name) or not theirs or answered:
        return ""
    return (
        f"warning: --learner {name}: {theirs[0]} is yours; tests score the network's plain outputs "
        "by the usual loss, unless you override call_network, answers or loss, too"
    )


def check_headline(worker: Worker, split: str, transductive: bool, flag: str) -> str:
    """Return a warning if all numbers are transductive, else ""; ``flag`` must not deny that."""
    reason = worker.why_transductive(split)
    if reason is None:
        return ""
    if not transductive:
        raise UserError(f"{flag}: {reason}, so it has no non-transductive number")
    return f"warning: {reason}: the numbers called non-transductive are transductive, too"


@torch.no_grad()
def after_steps(
    worker: Worker, params: Params, split: str, ids: Tensor, steps: Sequence[int]
) -> tuple[str, Tensor]:
    """Return accuracies (for a regression losses) of the tasks ``ids [T]`` after each number of
    inner ``steps``: the metric's name, and ``[T, len(steps)]``.
    """
    metric = "accuracy" if "accuracy" in worker.learner.metric_names else "loss"
    name = ("" if worker.config.transductive else "non_transductive_") + metric

    def of(own: Learner, tasks: Any) -> Tensor:
        each = (own.scores(_predictions(own, params, tasks, n), tasks.query_y) for n in steps)
        return torch.stack([scores[name] for scores in each], dim=1)

    return metric, torch.cat(worker.evaluated(split, ids, of))


def answers(own: Learner, params: Params, tasks: Task, steps: int) -> Tensor:
    """Return the outputs ``[B, E, …]`` that the headline judges, after ``steps`` inner steps."""
    by_queries, alone = _predictions(own, params, tasks, steps)
    return alone if by_queries is None or not own.config.transductive else by_queries


def _predictions(own: Learner, params: Params, tasks: Task, steps: int) -> Predictions:
    with draws.at("task", 0):  # as in a test, whatever was computed before
        return own.predictions(params, tasks, steps)


def evaluate(
    strategy: Strategy, models: Params | Sequence[Params], split: str, tasks: int, **how: Any
) -> dict[str, Any]:
    """Return the `means` of what `of_tasks` returns, for the same arguments."""
    values = of_tasks(strategy, models, split, tasks, **how)
    return means(values, split, strategy.worker.evaluation_names)


def of_tasks(
    strategy: Strategy,
    models: Params | Sequence[Params],
    split: str,
    tasks: int,
    *,
    progress: bool = False,
    between: Callable[[], None] = lambda: None,
) -> Tensor:
    """Evaluate tasks 0 … ``tasks`` − 1 of ``split`` in rounds; call ``between`` before each round.

    ``models`` is one model, or an ensemble, which only this process evaluates. Return each task's
    metrics, ``[tasks, len(evaluation_names)]``. Evaluation ends after one pass over the examples,
    because repeated examples would narrow the interval without new evidence.
    """
    config, worker = strategy.config, strategy.worker
    tasks = there_are(tasks, worker, split)
    # Rounds are small, to show progress and to react to a stop signal between two of them.
    round_size = max(config.task_batch, 4) * strategy.world.size
    rows = []
    with bar(tasks, split, "task", speaks=progress, leave=False) as shown:
        for ids in torch.arange(tasks).split(round_size):
            between()
            if isinstance(models, dict):
                rows.append(strategy.evaluate(models, split, ids))
            else:
                rows.append(worker.evaluate(models, split, ids))
            shown.update(len(ids))
    return torch.cat(rows)


def means(values: Tensor, split: str, names: Sequence[str]) -> dict[str, Any]:
    """Summarise the tasks' metrics ``values [T, len(names)]``.

    Return ``tasks``, ``split`` and, for every name, the mean over tasks and ``<name>_ci95``, the
    half-width 1.96·σ/√tasks (Finn et al. 2017, table 1).
    """
    result: dict[str, Any] = {"split": split, "tasks": len(values)}
    for name, column in zip(names, values.T, strict=True):
        result[name], result[f"{name}_ci95"] = mean_and_ci95(column)
    return result


def with_headline(test: dict[str, Any], *, transductive: bool) -> dict[str, Any]:
    """Return the result of `means` under the names of a run's ``result.json``.

    ``<name>`` is the variant that ``transductive`` selects, next to ``transductive_<name>`` and
    ``non_transductive_<name>``. ``ci95`` is the half-width of the `headline` metric.
    """
    prefix = "" if transductive else "non_transductive_"
    names = [name for name in test if f"{name}_ci95" in test]
    named = dict(test)
    for name in names:
        if not name.startswith("non_transductive_"):
            for key in (name, f"{name}_ci95"):
                named[f"transductive_{key}"], named[key] = test[key], test[prefix + key]
    return named | {"ci95": named[f"{headline(test)}_ci95"]}


def summary(result: dict[str, Any], config: Config, transductive: bool) -> str:
    """Describe a result in one line; show accuracy both transductive and non-transductive."""
    metric, known = headline(result), registry.learner(config.learner)

    def shown(prefix: str) -> str:
        return with_interval(result[prefix + metric], result[f"{prefix}{metric}_ci95"], metric)

    first, second = ("", "non_transductive_") if transductive else ("non_transductive_", "")
    names = {"": "transductive", "non_transductive_": "non-transductive"}
    said = shown(first)
    if metric == "accuracy":
        said += f" ({names[first]}), {shown(second)} ({names[second]})"
    others = [name for name in result if f"{name}_ci95" in result and name not in OURS]
    for name in filterfalse(is_taken, others):
        ci95 = result[f"{first}{name}_ci95"]
        said += f", {name} {with_interval(result[first + name], ci95, name)}"
    over, steps = result["tasks"], counted(config.eval_inner_steps, "inner step")
    queries, shots = counted(config.eval_queries, "query", "queries"), f"{config.shots}-shot"
    conditions = [counted(over, "task")]
    if known.tasks == "batches":
        said += f", precision@5 {100 * result[first + 'precision@5']:.2f} %"
        each = counted(config.batch_size, "example")
        conditions = [f"{counted(over, 'batch', 'batches')} of {each}"]
    elif metric == "return":
        conditions.append(f"{counted(config.eval_queries, 'episode')} each")
        if "return_before" in result:
            said += f", {result['return_before']:.2f} before"
            conditions.append(f"{steps} of {counted(config.shots, 'episode')} each")
    else:
        ways = f"{config.ways}-way {shots}, {queries} per class"
        conditions.append(f"{shots}, {queries}" if metric == "loss" else ways)
        conditions += [steps] if known.adapts_at_test else []
    return f"{result['split']} {metric} {said}: mean ± 95 % interval over {', '.join(conditions)}"


def with_interval(mean: float, ci95: float | None, metric: str) -> str:
    """Show a mean and the half-width of its interval; accuracies in percent."""
    unit, scale = (" %", 100.0) if metric == "accuracy" else ("", 1.0)
    return f"{scale * mean:.2f} ± {'?' if ci95 is None else f'{scale * ci95:.2f}'}{unit}"


def has_answers(scores: Mapping[str, Any]) -> bool:
    """Return whether all losses in ``scores`` are finite; if not, the accuracy means nothing."""
    return all(math.isfinite(scores[name]) for name in scores if name.endswith("loss"))


def no_answers(result: Mapping[str, Any]) -> str:
    """Return a warning if a result of `means` comes from meaningless answers, else ""."""
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
    """Return the mean of ``values [T]`` and 1.96·σ/√T (σ: sample deviation), or None if T < 2."""
    values = values.to(torch.float64)
    if len(values) < 2:
        return values.mean().item(), None
    return values.mean().item(), (1.96 * values.std() / len(values) ** 0.5).item()
