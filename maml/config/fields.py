"""The configuration: one frozen, flat dataclass; every field is a flag of the same name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from datasets import flags, paths
from datasets.flags import HOST, RESULT, SAME_RUN, WAY, Role, facts_of
from maml.config import registry
from maml.errors import UserError

_learner = partial(flags.flag, group="learner")
_data = partial(flags.flag, group="data")
_outer_loop = partial(flags.flag, group="outer loop")
_distribution = partial(flags.flag, group="distribution")
_evaluation = partial(flags.flag, group="evaluation")
_output = partial(flags.flag, group="output")


@dataclass(frozen=True)
class Common:
    """The fields that no component declares in its own file."""

    # These four fields describe a preset. They are not flags.
    preset: str = ""
    source: str = ""
    published: float | None = None
    claim: str = ""  # as in the published table, with its interval and its kind ("ensemble")

    learner: str = _learner("maml", "The learner: its inner problem and outer loss.")
    network: str = _learner("conv4", "The network: from examples to outputs.")
    inner_lr: float = _learner(
        0.4, "Inner-loop rate, on the mean support loss; metasgd: to begin with.", above=0
    )
    inner_steps: int = _learner(
        1, "Inner-loop steps while training; without --eval-inner-steps also at test.", least=0
    )
    eval_inner_steps: int = _learner(
        3, "Inner-loop steps at validation and test.", RESULT, least=0, chooses=True
    )
    inner_optimizer: Literal["sgd", "momentum", "adam", "adamw", "adam0"] = _learner(
        "sgd", "Inner-loop optimizer, differentiated through; adam0: Adam with β1 = 0."
    )
    order: Literal["second", "first"] = _learner(
        "second", "Meta-gradient: second differentiates through the inner gradients."
    )
    adapt: str | None = _learner(
        None,
        "Which parameters the inner loop adapts: PATTERN[=RATE],…. A pattern is a name, with * for "
        "any text, or @head, @body, @norm. RATE multiplies --inner-lr [all; anil: @head, boil: "
        "@body, mamlpp: *,@norm=0].",
    )  # fmt: skip
    discount: float = _learner(
        0.99, "Discount of a reward for each step that it comes later.", least=0, most=1
    )
    meta_gradient: Literal["auto", "reverse", "mixed"] = _learner(
        "auto", "reverse: through all steps; mixed: forward over reverse [mixed with kernels].", WAY
    )
    kernels: Literal["auto", "native", "torch"] = _learner(
        "auto", "Derivatives: native (compiled on first use) or torch [native where it can].", WAY
    )
    batching: Literal["auto", "vmap", "tasks"] = _learner(
        "auto",
        "Without native kernels: vmap: all tasks at once; tasks: each in a thread, as a plain "
        "loop [vmap where both agree and each task is little work].", WAY,
    )  # fmt: skip
    compile: Literal["auto", "off", "on"] = _learner(
        "auto",
        "on: compile what kernels do not serve; auto: in long runs on a CPU, if tasks are batched.",
        WAY,
    )
    dtype: Literal["float32", "float64"] = _learner(
        "float32", "Floating-point type of weights, images and gradients."
    )

    data: str = _data("glyphs", "Data set.")
    data_root: str = _data(
        lambda: str(paths.default_data_root()),
        "Folder that holds the data sets [$MAML_DATA, then ~/.cache/maml]; folder: of your images, "
        "as train/CLASS/*, validation/CLASS/* and test/CLASS/*, or CLASS/* alone.", HOST,
    )  # fmt: skip
    ways: int = _data(5, "Classes a task; supervised: classes in all.", least=1)
    shots: int = _data(1, "Support examples per class.", least=1)
    train_ways: int | None = _data(
        None, "Classes a task while training, if another number [--ways].", least=1
    )
    train_shots: int | None = _data(
        None, "Support examples a class in training, if it differs [--shots].", least=1
    )
    queries: int = _data(1, "Query examples per class while training.", least=1)
    eval_queries: int = _data(
        1, "Query examples per class at validation and test.", RESULT, least=1, chooses=True
    )
    horizon: int = _data(200, "Steps that an episode of acting takes at most.", least=1)
    batch_size: int = _data(64, "Examples of a mini-batch, which is a task.", least=1)

    seed: int = _outer_loop(
        0, "Seed of all that is random: weights, tasks, images.", least=0, most=2**63 - 1
    )
    init: str | None = _outer_loop(
        None, "Weights to begin with, of a run, record, checkpoint or state_dict [drawn by --seed]."
    )
    iterations: int = _outer_loop(
        1000, "Outer steps in all, a resumed run's earlier ones included.", RESULT, least=0
    )
    meta_batch_size: int = _outer_loop(32, "Tasks per iteration, over all workers.", least=1)
    meta_lr: float = _outer_loop(1e-3, "Learning rate of the outer loop.", above=0)
    meta_optimizer: Literal["adam", "sgd"] = _outer_loop("adam", "Optimizer of the outer loop.")
    meta_schedule: Literal["constant", "linear", "cosine", "halving"] = _outer_loop(
        "constant", "How --meta-lr falls to --meta-lr-end over the run, or halves."
    )
    meta_lr_end: float = _outer_loop(
        0.0, "linear, cosine: what --meta-lr falls to.",
        least=0, read_with=("meta_schedule", "linear", "cosine"),
    )  # fmt: skip
    meta_halve_every: int = _outer_loop(
        2000, "Iterations after which --meta-lr halves, again and again.",
        least=1, read_with=("meta_schedule", "halving"),
    )  # fmt: skip
    meta_decay: float = _outer_loop(
        0.5, "Factor of --meta-lr after each --meta-halve-every.",
        above=0, most=1, read_with=("meta_schedule", "halving"),
    )  # fmt: skip
    meta_eps: float = _outer_loop(
        1e-8, "ε of the outer loop's Adam, added to √v.",
        above=0, read_with=("meta_optimizer", "adam"),
    )  # fmt: skip
    meta_momentum: float = _outer_loop(
        0.0, "sgd: momentum of the outer loop.",
        least=0, below=1, read_with=("meta_optimizer", "sgd"),
    )  # fmt: skip
    grad_clip: float | None = _outer_loop(
        None, "Clip every element of the meta-gradient to this magnitude.", above=0
    )
    grad_clip_norm: float | None = _outer_loop(
        None, "Shrink a meta-gradient whose norm is larger to this norm.", above=0
    )
    weight_decay: float = _outer_loop(
        0.0, "An outer step shrinks weights by this, times its rate (AdamW).", least=0
    )
    freeze: str | None = _outer_loop(
        None, "Parameters that neither adapt nor learn: patterns, as for --adapt."
    )
    on_nonfinite: Literal["stop", "skip"] = _outer_loop(
        "stop", "After a step that is not finite, and so not taken: stop, or go on.", RESULT
    )
    strategy: str = _distribution("auto", "Where tasks run.", WAY)
    partition: Literal["exclusive", "chunk"] = _distribution(
        "exclusive", "One call a task (exclusive), or one a worker (chunk).", WAY
    )
    # The number is limited, because RPC starts all threads at once.
    rpc_threads: int = _distribution(16, "Threads that serve calls.", HOST, least=2, most=4096)
    timeout: float = _distribution(
        120.0, "End the run after this many seconds without a peer's answer.", WAY,
        above=0, most=2_000_000,  # RPC keeps a time limit as int32 milliseconds
    )  # fmt: skip
    batched_inference: Literal["true", "false"] = _distribution(
        "true", "One forward pass for all observers' requests (true), or one for each (false).", WAY
    )
    batch_wait: float = _distribution(
        0.2, "Answer an incomplete batch of requests after this many seconds.", WAY,
        above=0, read_with=("batched_inference", "true"),
    )  # fmt: skip
    threads: int | None = _distribution(
        None, "Computing threads per process [cores / processes on this host].", HOST, least=1
    )
    task_batch: int = _distribution(
        32, "Tasks that a worker batches; bounds memory, changes no result.", HOST, least=1
    )
    device: str = _distribution(
        "auto", "cpu, cuda, cuda:N, or auto: a GPU where there is one, by local rank.", HOST
    )

    eval_every: int = _evaluation(
        500, "Iterations between validations; 0: never.", WAY, least=0, chooses=True
    )
    eval_tasks: int = _evaluation(100, "Validation tasks each time.", WAY, least=1, chooses=True)
    test_tasks: int = _evaluation(
        600, "Test tasks at the end of the run; 0: no test.", RESULT, least=0
    )
    test_model: Literal["last", "best"] = _evaluation(
        "last", "Test the last model, or the one that validated best."
    )
    stop_after: int = _evaluation(
        0, "End training after so many validations without a better model; 0: never.", RESULT,
        least=0, read_with=("test_model", "best"),
    )  # fmt: skip
    eval_draws: bool = _evaluation(
        False, "Let the network draw at validation and test, as dropout does.", RESULT, chooses=True
    )
    transductive: bool = _evaluation(
        True, "Headline by the query set's statistics (both are reported).", RESULT, chooses=True
    )

    run_dir: str | None = _output(None, "The run directory, exactly [runs/<preset>-<time>].", HOST)
    checkpoint_every: int = _output(
        500, "Iterations between checkpoints; there is always one at the end.", WAY, least=1
    )
    keep_checkpoints: int = _output(5, "How many of the newest checkpoints are kept.", WAY, least=1)
    keep_best: int = _output(
        0, "How many of the models that validated best are kept, for maml.evaluate.", WAY, least=0
    )
    resume: str = _output(
        "auto", "auto: go on from the run directory's checkpoint, if any; never; or a path.", HOST
    )
    log_every: int = _output(10, "Iterations between rows of metrics.jsonl.", WAY, least=1)
    logger: Literal["wandb", "tensorboard", "none"] = _output(
        "wandb", "Where numbers go, too, after metrics.jsonl; wandb: offline without a key.", HOST
    )


def _own_flags() -> list[tuple[str, Any, Any]]:
    """Return the flags that components declare in their own files: names, types and fields."""
    groups = {"network": "learner", "strategy": "distribution"}
    found = {}
    for kind in registry.KINDS:
        for component in registry.known(kind).values():
            for name, (of, declare) in component.flags.items():
                found[name] = (name, of, declare(group=groups.get(kind, kind)))
    return list(found.values())


if TYPE_CHECKING:

    class Config(Common):
        """A `Common` with the flags that components declare in their own files."""

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    Config = dataclasses.make_dataclass(
        "Config", _own_flags(), bases=(Common,), namespace={"__module__": __name__}, frozen=True
    )


FACTS = facts_of(Config)
"""The `FieldFacts` of each field, by name."""
FLAGS = tuple(name for name, facts in FACTS.items() if facts.group)
"""The fields that are flags."""


def _with_role(role: Role) -> tuple[str, ...]:
    return tuple(name for name, facts in FACTS.items() if facts.role is role)


MUST_MATCH = _with_role(SAME_RUN)
"""Fields in which a resumed run must match its beginning."""
OF_THE_RESULT = _with_role(RESULT)
"""Further fields that a result depends on. A resumed run may change them."""
CHOOSING = tuple(name for name, facts in FACTS.items() if facts.chooses)
"""Fields that define a validation. With ``--test-model best``, validations choose the model."""
OF_A_CHECKPOINT = tuple(dict.fromkeys((*MUST_MATCH, *CHOOSING, *OF_THE_RESULT)))
"""Fields that a checkpoint saves."""
OF_A_HOST = _with_role(HOST)
"""Fields that describe a host, or that only rank 0 reads. They may differ between processes, and no
result depends on them."""


def must_match(config: Config) -> tuple[str, ...]:
    """Return the fields in which a run that resumes with ``config`` must match its beginning."""
    # The same kind of validation must choose all models that are kept as the best.
    choosing = CHOOSING if config.test_model == "best" or config.keep_best else ()
    # If the rate falls over the whole run, every step depends on the length of the run.
    falls = config.meta_schedule in ("linear", "cosine")
    end = ("iterations" if config.epochs is None else "epochs",) if falls else ()
    return (*MUST_MATCH, *choosing, *end)


def settings(config: Config) -> tuple[str, ...]:
    """Return the fields that a result of ``config`` depends on, including the seed."""
    choosing = CHOOSING if config.test_model == "best" else ()
    names = dict.fromkeys((*MUST_MATCH, *choosing, *OF_THE_RESULT))
    # The number of iterations follows from --epochs.
    return tuple(name for name in names if name != "iterations" or config.epochs is None)


def from_values(values: dict[str, Any]) -> Config:
    """Return a `Config` with ``values``. A `UserError` names an unknown field or a wrong value."""
    types, exact = get_type_hints(Config), dict(values)
    for name, value in values.items():
        if name not in types:
            raise UserError(f"unknown field {name!r}")
        if not _fits(value, types[name]):
            choices = get_args(types[name]) if get_origin(types[name]) is Literal else ()
            expected = getattr(types[name], "__name__", types[name])
            expected = f"one of {', '.join(choices)}" if choices else expected
            raise UserError(f"{name}: {value!r} is not {expected}")
        if type(value) is int and float in (types[name], *get_args(types[name])):
            exact[name] = float(value)  # else 1 and 1.0 would name two experiments
    return Config(**exact)


def _fits(value: object, type_: Any) -> bool:
    """Return whether a value fits a field's type. An int also fits float. True is no int here."""
    if get_origin(type_) is Literal:
        return value in get_args(type_)
    options = get_args(type_) or (type_,)
    return type(value) in options or (type(value) is int and float in options)


def with_values(config: Config, **values: object) -> Config:
    """Return ``config`` with some fields replaced, as `dataclasses.replace` does."""
    return dataclasses.replace(config, **values)  # type: ignore[arg-type]


def user_path(name: str, value: str) -> Path:
    """Return a flag's value as a path. Expand ``~``, because a shell does not do so in quotes."""
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise UserError(f"{flag(name)} {value}: {error}") from error


def flag(name: str) -> str:
    """Return the command-line spelling of a field."""
    return "--" + name.replace("_", "-")
