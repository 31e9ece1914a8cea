"""The flags of how a run goes: where tasks run, how models are tested, what is written down."""

from dataclasses import dataclass
from typing import Literal

from maml.config.flags import HOST, RESULT, WAY, flag
from maml.errors import UserError


@dataclass(frozen=True)
class Distribution:
    """The strategy and the processes."""

    strategy: str = flag("auto", WAY)
    """Where tasks run."""
    partition: Literal["exclusive", "chunk"] = flag("exclusive", WAY)
    """One call a task (exclusive), or one a worker (chunk)."""
    # The number is limited, because RPC starts all threads at once.
    rpc_threads: int = flag(16, HOST, least=2, most=4096)
    """Threads that serve calls."""
    # RPC keeps a time limit as int32 milliseconds.
    timeout: float = flag(120.0, WAY, above=0, most=2_000_000)
    """End the run after this many seconds without a peer's answer."""
    batched_inference: Literal["true", "false"] = flag("true", WAY)
    """One forward pass for all observers' requests (true), or one for each (false)."""
    batch_wait: float = flag(0.2, WAY, above=0, read_with=("batched_inference", "true"))
    """Answer an incomplete batch of requests after this many seconds."""
    threads: int | None = flag(None, HOST, least=1)
    """Computing threads per process [cores / processes on this host]."""
    task_batch: int = flag(32, HOST, least=1)
    """Tasks that a worker batches; bounds memory, changes no result."""
    device: str = flag("auto", HOST)
    """cpu, cuda, cuda:N (or another accelerator of torch), or auto: a GPU if any, by local rank."""

    # Of allreduce.
    check_every: int = flag(100, WAY, least=0)
    """Iterations between checks that ranks hold equal parameters; 0: never."""

    # Of the parameter server.
    ps_mode: Literal["sync", "async", "backup"] = flag("sync", RESULT)
    """All gradients of a step; each as it arrives; or the first n - b of a step."""
    ps_transport: Literal["rpc", "collective"] = flag("rpc", WAY)
    """RPC, or broadcast and gather (only in sync mode)."""
    ps_forward: Literal["local", "remote"] = flag("local", WAY)
    """Trainers pull the model, or call its forward (distributed autograd)."""
    ps_max_staleness: int = flag(8, RESULT, least=0, read_with=("ps_mode", "async"))
    """Updates that a gradient may be behind; older ones are dropped and counted."""
    ps_backup_workers: int = flag(1, RESULT, least=0, read_with=("ps_mode", "backup"))
    """Trainers b that a step goes without."""

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

    eval_every: int = flag(500, WAY, least=0, chooses=True)
    """Iterations between validations; 0: never."""
    eval_tasks: int = flag(100, WAY, least=1, chooses=True)
    """Validation tasks each time."""
    test_tasks: int = flag(600, RESULT, least=0)
    """Test tasks at the end of the run; 0: no test."""
    test_model: Literal["last", "best"] = flag("last")
    """Test the last model, or the one that validated best."""
    stop_after: int = flag(0, RESULT, least=0, read_with=("test_model", "best"))
    """End training after so many validations without a better model; 0: never."""
    eval_draws: bool = flag(False, RESULT, chooses=True)
    """Let the network draw at validation and test, as dropout does."""
    transductive: bool = flag(True, RESULT, chooses=True)
    """Headline by the query set's statistics (both are reported)."""

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

    run_dir: str | None = flag(None, HOST)
    """The run directory, exactly [runs/<preset>-<time>]."""
    checkpoint_every: int = flag(500, WAY, least=1)
    """Iterations between checkpoints; there is always one at the end."""
    keep_checkpoints: int = flag(5, WAY, least=1)
    """Keep this many of the newest checkpoints, and delete older ones."""
    keep_best: int = flag(0, WAY, least=0)
    """Keep this many of the models that validated best, for maml.evaluate --iteration."""
    resume: str = flag("auto", HOST)
    """auto: go on from the run directory's checkpoint, if any; never; or a path."""
    log_every: int = flag(10, WAY, least=1)
    """Iterations between rows of metrics.jsonl."""
    logger: Literal["wandb", "tensorboard", "none"] = flag("wandb", HOST)
    """Where numbers go, too, after metrics.jsonl; wandb: offline without a key."""

    def check(self) -> None:
        """Refuse values that cannot work together."""
        if self.keep_best and not self.eval_every:
            raise UserError(
                f"--eval-every 0: validates no model, so --keep-best {self.keep_best} has none to "
                "keep; give --keep-best 0, too"
            )
