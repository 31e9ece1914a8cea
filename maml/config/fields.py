"""The configuration: one frozen, flat dataclass; every field is a flag of the same name."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Suppress

from maml.errors import UserError


def default_data_root() -> str:
    """``$MAML_DATA``, then ``~/.cache/maml``; absolute.

    It is `datasets.cache.default_data_root`, which is not called: importing ``datasets`` imports
    torch, for which --help and a mistyped flag do not wait.
    """
    root = os.environ.get("MAML_DATA") or Path.home() / ".cache" / "maml"
    return str(Path(root).expanduser().absolute())


MUST_MATCH = (
    "learner", "network", "filters", "data", "omniglot_split", "image_size", "image_mode",
    "split_fractions", "ways", "shots", "seed", "dtype",
    "meta_lr", "queries", "inner_lr", "inner_steps", "inner_optimizer", "order", "meta_batch_size",
    "grad_clip", "meta_optimizer", "meta_momentum", "batch_size", "precision", "proximal",
    "cg_steps", "cg_damping",
)  # fmt: skip
"""What a resumed run must share with its beginning to be the same run."""

OF_THE_RESULT = (
    "iterations", "epochs", "eval_inner_steps", "eval_queries", "test_tasks", "transductive",
    "ps_mode", "ps_max_staleness", "ps_backup_workers",
)  # fmt: skip
"""What else a result depends on; a resumed run may have it otherwise."""

OF_A_HOST = (
    "data_root", "device", "threads", "task_batch", "rpc_threads", "run_dir", "resume", "logger",
)  # fmt: skip
"""What a host has, and what rank 0 alone reads: may differ between processes; no result depends
on it."""


@dataclass(frozen=True)
class Config:
    """Train a few-shot learner or a classifier. PRESET fills every flag below; a flag overrides."""

    # ---- what a preset is (not flags) -------------------------------------------------------
    preset: Suppress[str] = ""
    source: Suppress[str] = ""
    published: Suppress[float | None] = None

    # ---- learner ----------------------------------------------------------------------------
    learner: Literal["maml", "anil", "metasgd", "imaml", "supervised"] = "maml"
    """What a task's outer loss is: maml; anil: adapts the output layer alone; metasgd: learns a
    rate for each weight; imaml: the implicit gradient of a regularised inner loop; supervised: a
    task is a mini-batch, without an inner loop."""
    network: Literal[
        "conv4", "conv4-pool", "mlp", "lenet",
        "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
        "vgg11", "vgg13", "vgg16", "vgg19",
    ] = "conv4"  # fmt: skip
    """conv4: strided blocks, spatial mean; conv4-pool: max-pools, flattened; mlp: regression;
    the others: ordinary classifiers, torchvision's but for lenet, adapted to the images."""
    filters: int = 64
    """conv4 and conv4-pool: channels of each of the network's convolutions."""
    inner_lr: float = 0.4
    """Inner-loop learning rate, on the mean loss over the support set; metasgd: to begin with."""
    inner_steps: int = 1
    """Inner-loop steps while training."""
    eval_inner_steps: int = 3
    """Inner-loop steps at validation and test."""
    inner_optimizer: Literal[
        "sgd", "momentum", "adam", "adamw", "adamax", "radam", "rmsprop", "adagrad", "adadelta"
    ] = "sgd"
    """Inner-loop optimizer, differentiated through (TorchOpt's functional ones)."""
    order: Literal["second", "first"] = "second"
    """Order of the meta-gradient: second differentiates through the inner gradients."""
    proximal: float = 2.0
    """imaml: strength λ of the pull that the initial weights exert on the adapted ones."""
    cg_steps: int = 5
    """imaml: steps of conjugate gradient for each task's meta-gradient."""
    cg_damping: float = 0.0
    """imaml: added to the identity in what conjugate gradient solves; 0: the paper's equation."""
    meta_gradient: Literal["auto", "reverse", "mixed"] = "auto"
    """reverse: through the whole inner loop; mixed: forward over reverse [mixed with kernels]."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """The network's derivatives: native (compiled on first use) or torch [native where it can]."""
    compile: Literal["auto", "off", "on"] = "auto"
    """on: compile what kernels do not serve; auto: so in long runs on a CPU, else a CUDA graph."""

    # ---- data -------------------------------------------------------------------------------
    data: Literal[
        "glyphs", "omniglot", "miniimagenet", "sinusoid", "folder",
        "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn",
    ] = "glyphs"  # fmt: skip
    """Data set: glyphs is drawn by the program and needs no files; folder: your own images."""
    data_root: str = dataclasses.field(default_factory=default_data_root)
    """Folder that holds the data sets [$MAML_DATA, then ~/.cache/maml]; folder: of your images, as
    train/CLASS/*, validation/CLASS/* and test/CLASS/*, or CLASS/* alone."""
    omniglot_split: Literal["maml", "mamlpp", "vinyals"] = "maml"
    """Which named split of Omniglot's classes: 1100/100/423, 1150/50/423 or 1028/172/423."""
    image_size: int = 84
    """folder: width and height of the images; the shorter side is resized, the longer one cut."""
    image_mode: Literal["rgb", "grey"] = "rgb"
    """folder: colour or grey."""
    split_fractions: str = "0.64,0.16,0.2"
    """folder: of the classes, for train, validation and test, where they are not divided."""
    ways: int = 5
    """Classes a task; supervised: classes in all."""
    shots: int = 1
    """Support examples per class."""
    queries: int = 1
    """Query examples per class while training."""
    eval_queries: int = 1
    """Query examples per class at validation and test."""
    batch_size: int = 64
    """supervised: examples of a mini-batch, which is a task."""

    # ---- outer loop -------------------------------------------------------------------------
    seed: int = 0
    """Seed of everything random: initial weights, tasks, images, rotations."""
    iterations: int = 1000
    """Outer-loop iterations in all, a resumed run's earlier ones included."""
    epochs: int | None = None
    """supervised: passes over the training examples, in place of --iterations."""
    meta_batch_size: int = 32
    """Tasks per iteration, over all workers."""
    meta_lr: float = 1e-3
    """Learning rate of the outer loop."""
    meta_optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer of the outer loop."""
    meta_momentum: float = 0.0
    """sgd: momentum of the outer loop."""
    grad_clip: float | None = None
    """Clip every element of the meta-gradient to this magnitude."""

    # ---- where tasks run --------------------------------------------------------------------
    strategy: Literal["auto", "local", "rpc", "allreduce", "param-server"] = "auto"
    """Where tasks run: auto is local in one process and rpc under torchrun."""
    partition: Literal["exclusive", "chunk"] = "exclusive"
    """rpc: one call a task (exclusive) or one call a worker (chunk)."""
    rpc_threads: int = 16
    """rpc, param-server: threads that serve calls; rpc keeps the calls in flight below it."""
    timeout: float = 120.0
    """Seconds without a peer's answer after which the run ends."""
    check_every: int = 100
    """allreduce: iterations between checks that all ranks hold the same parameters; 0: never."""
    ps_mode: Literal["sync", "async", "backup"] = "sync"
    """param-server: all gradients of a step; each as it arrives; or the first n - b of a step."""
    ps_transport: Literal["rpc", "collective"] = "rpc"
    """param-server: RPC, or (sync alone) broadcast and gather."""
    ps_forward: Literal["local", "remote"] = "local"
    """param-server: trainers pull the model, or call its forward where it is (distributed
    autograd, DistributedOptimizer)."""
    ps_max_staleness: int = 8
    """async: updates that a gradient may be behind; older ones are dropped and counted."""
    ps_backup_workers: int = 1
    """backup: trainers b that a step does not wait for."""
    threads: int | None = None
    """Computing threads per process [cores / processes on this host]."""
    task_batch: int = 16
    """Tasks that a worker batches together; bounds memory, changes no result."""
    dtype: Literal["float32", "float64"] = "float32"
    """Floating-point type of weights, images and gradients."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """Products inside a float32 network: exact, TF32 where the device has it, or bfloat16."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: a GPU where there is one, shared out by local rank."""

    # ---- evaluation, logs, checkpoints ------------------------------------------------------
    eval_every: int = 500
    """Iterations between validations; 0: never."""
    eval_tasks: int = 100
    """Validation tasks each time."""
    test_tasks: int = 600
    """Test tasks at the end of the run; 0: no test."""
    transductive: bool = True
    """Headline accuracy with batch statistics of the query set (both are always reported)."""
    run_dir: str | None = None
    """The run directory, exactly [runs/<preset>-<time>]."""
    checkpoint_every: int = 500
    """Iterations between checkpoints; there is always one at the end."""
    keep_checkpoints: int = 5
    """How many checkpoints, the newest, are kept for evaluators; last.pt is the last of them."""
    resume: str = "auto"
    """auto: continue from the run directory's checkpoint if it has one; never; or a path."""
    log_every: int = 10
    """Iterations between rows of metrics.jsonl."""
    logger: Literal["wandb", "tensorboard", "none"] = "wandb"
    """Where the numbers go beside metrics.jsonl; wandb runs offline when there is no key."""


def from_values(values: dict[str, Any]) -> Config:
    """Return the `Config` of ``values``, field by field, as a file holds them.

    Raises:
        UserError: naming the first field that there is not, or whose value is of a wrong type.
    """
    types = get_type_hints(Config)
    for name, value in values.items():
        if name not in types:
            raise UserError(f"unknown field {name!r}")
        if not _fits(value, types[name]):
            choices = get_args(types[name]) if get_origin(types[name]) is Literal else ()
            expected = f"one of {', '.join(choices)}" if choices else Config.__annotations__[name]
            raise UserError(f"{name}: {value!r} is not {expected}")
    return Config(**values)


def _fits(value: object, type_: Any) -> bool:
    """Whether a value of a file is of a field's type; an integer is a float, True is neither."""
    if get_origin(type_) is Literal:
        return value in get_args(type_)
    options = get_args(type_) or (type_,)
    if isinstance(value, int) and not isinstance(value, bool) and float in options:
        return True
    return type(value) in options


def user_path(name: str, value: str) -> Path:
    """Return the path that a flag's value means, ``~`` expanded: a shell leaves it in quotes.

    Raises:
        UserError: naming the field's flag, if there is no such user.
    """
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise UserError(f"{flag(name)} {value}: {error}") from error


def flag(name: str) -> str:
    """Return the command-line spelling of a field."""
    return "--" + name.replace("_", "-")
