"""Which names a learner's metrics may not have: a run writes numbers of its own beside them.

A row of metrics.jsonl, result.json and a line of test_tasks.csv are flat: a metric stands there by
its name, and another number of that name would be lost.
"""

from maml.errors import UserError

TAKEN = {
    # Rows of metrics.jsonl: of all, of training, and of validations and the test.
    *("iteration", "seconds", "loss"),
    *("tasks_per_second", "skipped", "gradient_norm", "time"),
    *("split", "tasks", "after", "rates"),
    # `Strategy.report`, in rows of training: of all, of collectives, of servers and of observers.
    *("wire_bytes", "reduce_seconds"),
    *("server_seconds", "dropped", "staleness"),
    *("forwards", "requests", "flushed", "missed_tasks"),
    # result.json, also of a record.
    *("ci95", "transductive", "preset", "published", "claim", "source", "deviations", "changed"),
    *("iterations", "tested_iteration", "test_images", "diverged", "ensemble"),
    # evaluations.jsonl: what was asked.
    *("data", "ways", "shots", "eval_queries", "eval_inner_steps"),
    # test_tasks.csv: which task it is.
    *("seed", "index"),
}
BEFORE, AFTER = ("non_transductive_", "transductive_", "ensemble_"), ("_ci95",)
"""What is put before and after each metric's name, for more numbers of it."""


def is_taken(name: str) -> bool:
    """Say whether a run may have a number of its own of that name, or of a part ``time/…``."""
    return name.partition("/")[0] in TAKEN or name.startswith(BEFORE) or name.endswith(AFTER)


def check_metric_names(names: object, what: str) -> None:
    """Refuse metric names that would overwrite something, or that no file can have."""
    what += ": metric_names"
    if not isinstance(names, (tuple, list)):
        raise UserError(f"{what} is of type {type(names).__name__}: make it a tuple of names")
    for name in names:
        # A subclass, as of an enumeration, is written one way here and another way there.
        if type(name) is not str or not name or not name.isprintable() or names.count(name) > 1:
            raise UserError(f"{what} has {name!r}: each is a plain string to print, and there once")
        if is_taken(name):
            raise UserError(
                f"{what} has {name!r}: taken by a run's own numbers, as are all names of "
                "maml/learners/metric_names.py: give another name"
            )
