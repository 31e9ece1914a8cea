"""What a configuration's values may be, each and together; bad ones end in one line."""

from __future__ import annotations

import math
import os

from maml.config import Config, flag
from maml.errors import UserError

MOST = 2**31 - 1
"""What is counted is at most this: beyond, some library's int32 overflows, far from the flag."""
MOST_SEED = 2**63 - 1
MOST_SECONDS = 2_000_000
"""RPC keeps a time limit as int32 milliseconds."""
MOST_RPC_THREADS = 4096
"""They are all started at once."""


def most_threads() -> int:
    """Return the most computing threads: with more, OpenMP crashes or crawls on this machine."""
    return 8 * (os.cpu_count() or 1)


NOT_FEW_SHOT = ("mnist", "fashion-mnist", "cifar10", "cifar100", "svhn")
"""Data sets of ``--learner supervised`` alone."""


def check(config: Config, preset: Config | None = None) -> None:
    """Raise `UserError` naming the first flag whose value cannot work, or has no effect.

    Args:
        preset: What the flags were given on top of: what it has itself may have no effect. By
            default, nothing was given.
    """
    check_values(config)
    # Not among those: a run directory may have been made on a machine of more cores.
    if config.threads is not None and config.threads > most_threads():
        raise UserError(
            f"--threads must be at most {most_threads()}, 8 for each core of this machine, "
            f"not {config.threads}"
        )
    if preset is not None:
        _check_read(config, preset)


def check_values(config: Config) -> None:
    """Raise `UserError` naming the first flag whose value cannot work on any machine."""
    for name in ("data_root", "run_dir", "resume", "device"):
        if getattr(config, name) == "":
            raise UserError(f'{flag(name)} "": empty; was a shell variable not set?')
    at_least = {
        "filters": 1,
        "image_size": 1,
        "ways": 1,
        "shots": 1,
        "queries": 1,
        "eval_queries": 1,
        "inner_steps": 0,
        "eval_inner_steps": 0,
        "cg_steps": 0,
        "batch_size": 1,
        "iterations": 0,
        "epochs": 1,
        "meta_batch_size": 1,
        "rpc_threads": 2,
        "threads": 1,
        "task_batch": 1,
        "check_every": 0,
        "ps_max_staleness": 0,
        "ps_backup_workers": 0,
        "eval_every": 0,
        "eval_tasks": 1,
        "test_tasks": 0,
        "checkpoint_every": 1,
        "keep_checkpoints": 1,
        "log_every": 1,
        "seed": 0,
    }
    at_most = dict.fromkeys(at_least, MOST)
    at_most |= {"seed": MOST_SEED, "rpc_threads": MOST_RPC_THREADS, "timeout": MOST_SECONDS}
    for name, least in at_least.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise UserError(f"{flag(name)} must be at least {least}, not {value}")
    for name in ("inner_lr", "meta_lr", "timeout", "grad_clip", "proximal"):
        value = getattr(config, name)
        # `not` a chain of `<` rather than `<=`: nan must fail too.
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag(name)} must be positive and finite, not {value}")
    for name, most in at_most.items():
        value = getattr(config, name)
        if value is not None and value > most:
            raise UserError(f"{flag(name)} must be at most {most}, not {value}")
    _check_combinations(config)


def _check_read(config: Config, preset: Config) -> None:
    """Raise `UserError` for a value, other than the preset's, that nothing chosen reads."""
    of_server = ("ps_mode", "ps_transport", "ps_forward")
    of_few_shot = (
        "inner_lr", "inner_steps", "eval_inner_steps", "inner_optimizer", "shots", "queries",
        "eval_queries",
    )  # fmt: skip
    of_implicit = ("proximal", "cg_steps", "cg_damping")
    readers: dict[str, tuple[str, tuple[str, ...]]] = {
        "partition": ("strategy", ("auto", "rpc")),
        "check_every": ("strategy", ("allreduce",)),
        **dict.fromkeys(of_server, ("strategy", ("param-server",))),
        "ps_max_staleness": ("ps_mode", ("async",)),
        "ps_backup_workers": ("ps_mode", ("backup",)),
        **dict.fromkeys(of_few_shot, ("learner", ("anil", "metasgd", "imaml", "maml"))),
        **dict.fromkeys(of_implicit, ("learner", ("imaml",))),
        "order": ("learner", ("anil", "metasgd", "maml")),
        "batch_size": ("learner", ("supervised",)),
        "filters": ("network", ("conv4-pool", "conv4")),
        "omniglot_split": ("data", ("omniglot",)),
        **dict.fromkeys(("image_size", "image_mode", "split_fractions"), ("data", ("folder",))),
    }
    for name, (chooser, values) in readers.items():
        value, chosen = getattr(config, name), getattr(config, chooser)
        if value != getattr(preset, name) and chosen not in values:
            raise UserError(
                f"{flag(name)} {value} is for {flag(chooser)} {values[-1]}, not {chosen}"
            )
    if config.ways != preset.ways and config.data == "sinusoid":
        raise UserError(f"--ways {config.ways}: --data sinusoid has no classes")
    if config.epochs is not None and config.iterations != preset.iterations:
        raise UserError(
            f"--epochs {config.epochs} and --iterations {config.iterations}: each says how long to "
            "train; give one of them"
        )


def _check_combinations(config: Config) -> None:
    """Raise `UserError` for values that cannot work together."""
    supervised = config.learner == "supervised"
    if config.epochs is not None and not supervised:
        raise UserError(
            f"--epochs {config.epochs}: few-shot tasks never end; give --learner {config.learner} "
            "--iterations"
        )
    if config.learner == "metasgd" and not config.inner_steps:
        raise UserError("--inner-steps 0: --learner metasgd would have no use for its rates")
    if config.learner == "imaml" and config.meta_gradient == "reverse":
        raise UserError("--meta-gradient reverse: that of --learner imaml is implicit")
    if not 0 <= config.cg_damping < math.inf:
        raise UserError(f"--cg-damping must be at least 0 and finite, not {config.cg_damping}")
    if config.data in NOT_FEW_SHOT and not supervised:
        raise UserError(
            f"--data {config.data}: --learner {config.learner} learns from few-shot data sets; "
            "--learner supervised learns this one"
        )
    if supervised and config.data == "sinusoid":
        raise UserError("--data sinusoid: --learner supervised learns to classify")
    if supervised and config.data in ("miniimagenet", "folder"):
        raise UserError(
            f"--data {config.data}: its splits share no class, for few-shot tasks alone; "
            "--learner supervised tests on the classes it learned"
        )
    if (config.data == "sinusoid") != (config.network == "mlp"):
        raise UserError(f"--network {config.network} cannot learn --data {config.data}")
    if config.kernels == "native" and config.meta_gradient == "reverse":
        raise UserError("--kernels native: they serve --meta-gradient mixed, not reverse")
    if not 0 <= config.meta_momentum < 1:
        raise UserError(f"--meta-momentum must be in [0, 1), not {config.meta_momentum}")
    if config.meta_momentum and config.meta_optimizer != "sgd":
        raise UserError(f"--meta-momentum: --meta-optimizer {config.meta_optimizer} has none")
    if config.ps_transport == "collective":
        for name, only in (("ps_mode", "sync"), ("ps_forward", "local")):
            if getattr(config, name) != only:
                raise UserError(
                    f"{flag(name)} {getattr(config, name)} needs --ps-transport rpc: "
                    f"collectives serve {flag(name)} {only} alone"
                )
    if supervised:
        for name, served in (("kernels", "native"), ("meta_gradient", "mixed")):
            if getattr(config, name) == served:
                raise UserError(f"{flag(name)} {served}: for learners with an inner loop")
    if config.precision != "float32" and config.dtype != "float32":
        raise UserError(f"--precision {config.precision} needs --dtype float32, not {config.dtype}")
    if config.kernels == "native" and config.precision == "bf16":
        raise UserError("--kernels native: they compute in float32, not in --precision bf16")
    if config.kernels == "native" and config.compile == "on":
        raise UserError("--compile on: with --kernels native nothing is left to compile")
