"""The flags of how a run goes: where tasks run, how models are tested, what is written down."""

from dataclasses import dataclass
from typing import Literal

from maml.config.flags import HOST, RESULT, WAY, flag
from maml.errors import UserError


@dataclass(frozen=True)
class Distribution:
    """The strategy and the processes."""

    strategy: str = flag("auto", "Where tasks run.", WAY)
    partition: Literal["exclusive", "chunk"] = flag(
        "exclusive", "One call a task (exclusive), or one a worker (chunk).", WAY
    )
    # The number is limited, because RPC starts all threads at once.
    rpc_threads: int = flag(16, "Threads that serve calls.", HOST, least=2, most=4096)
    timeout: float = flag(
        120.0, "End the run after this many seconds without a peer's answer.", WAY,
        above=0, most=2_000_000,  # RPC keeps a time limit as int32 milliseconds
    )  # fmt: skip
    batched_inference: Literal["true", "false"] = flag(
        "true", "One forward pass for all observers' requests (true), or one for each (false).", WAY
    )
    batch_wait: float = flag(
        0.2, "Answer an incomplete batch of requests after this many seconds.", WAY,
        above=0, read_with=("batched_inference", "true"),
    )  # fmt: skip
    threads: int | None = flag(
        None, "Computing threads per process [cores / processes on this host].", HOST, least=1
    )
    task_batch: int = flag(
        32, "Tasks that a worker batches; bounds memory, changes no result.", HOST, least=1
    )
    device: str = flag(
        "auto", "cpu, cuda, cuda:N, or auto: a GPU where there is one, by local rank.", HOST
    )

    # Of allreduce.
    check_every: int = flag(
        100, "Iterations between checks that ranks hold equal parameters; 0: never.", WAY, least=0
    )

    # Of the parameter server.
    ps_mode: Literal["sync", "async", "backup"] = flag(
        "sync", "All gradients of a step; each as it arrives; or the first n - b of a step.", RESULT
    )
    ps_transport: Literal["rpc", "collective"] = flag(
        "rpc", "RPC, or broadcast and gather (only in sync mode).", WAY
    )
    ps_forward: Literal["local", "remote"] = flag(
        "local", "Trainers pull the model, or call its forward (distributed autograd).", WAY
    )
    ps_max_staleness: int = flag(
        8, "Updates that a gradient may be behind; older ones are dropped and counted.", RESULT,
        least=0, read_with=("ps_mode", "async"),
    )  # fmt: skip
    ps_backup_workers: int = flag(
        1, "Trainers b that a step goes without.", RESULT, least=0, read_with=("ps_mode", "backup")
    )

    def check(self) -> None:
        """Refuse values that cannot work together."""
        served = (("--ps-mode", self.ps_mode, "sync"), ("--ps-forward", self.ps_forward, "local"))
        for name, value, only in served:
            if self.ps_transport == "collective" and value != only:
                raise UserError(
                    f"{name} {value} needs --ps-transport rpc: collectives serve {only} alone"
                )


@dataclass(frozen=True)
class Evaluation:
    """Validations and tests."""

    eval_every: int = flag(
        500, "Iterations between validations; 0: never.", WAY, least=0, chooses=True
    )
    eval_tasks: int = flag(100, "Validation tasks each time.", WAY, least=1, chooses=True)
    test_tasks: int = flag(600, "Test tasks at the end of the run; 0: no test.", RESULT, least=0)
    test_model: Literal["last", "best"] = flag(
        "last", "Test the last model, or the one that validated best."
    )
    stop_after: int = flag(
        0, "End training after so many validations without a better model; 0: never.", RESULT,
        least=0, read_with=("test_model", "best"),
    )  # fmt: skip
    eval_draws: bool = flag(
        False, "Let the network draw at validation and test, as dropout does.", RESULT, chooses=True
    )
    transductive: bool = flag(
        True, "Headline by the query set's statistics (both are reported).", RESULT, chooses=True
    )

    def check(self) -> None:
        """Refuse values that cannot work together."""
        if self.test_model == "best" and self.test_tasks and not self.eval_every:
            raise UserError(
                "--eval-every 0: validates no model, so --test-model best has none to test; give "
                "--test-model last, too"
            )


@dataclass(frozen=True)
class Output(Evaluation):
    """What a run writes."""

    run_dir: str | None = flag(None, "The run directory, exactly [runs/<preset>-<time>].", HOST)
    checkpoint_every: int = flag(
        500, "Iterations between checkpoints; there is always one at the end.", WAY, least=1
    )
    keep_checkpoints: int = flag(5, "How many of the newest checkpoints are kept.", WAY, least=1)
    keep_best: int = flag(
        0, "How many of the models that validated best are kept, for maml.evaluate.", WAY, least=0
    )
    resume: str = flag(
        "auto", "auto: go on from the run directory's checkpoint, if any; never; or a path.", HOST
    )
    log_every: int = flag(10, "Iterations between rows of metrics.jsonl.", WAY, least=1)
    logger: Literal["wandb", "tensorboard", "none"] = flag(
        "wandb", "Where numbers go, too, after metrics.jsonl; wandb: offline without a key.", HOST
    )

    def check(self) -> None:
        """Refuse values that cannot work together."""
        if self.keep_best and not self.eval_every:
            raise UserError(
                f"--eval-every 0: validates no model, so --keep-best {self.keep_best} has none to "
                "keep; give --keep-best 0, too"
            )
