"""Log a run's numbers: always to metrics.jsonl, and on request to a sink (W&B or TensorBoard).

Only rank 0 writes. A sink may raise any error. The log then prints one line and leaves the sink
out, and the run goes on. The sink works in its own thread, so that a server which does not answer
cannot delay training.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import psutil
import torchopt.distributed as todist

from maml.config import Config, saved
from maml.processes.clock import within
from maml.run.files import append_row, keep_rows, write_text

LAST_WORDS = 20.0
"""Seconds that a sink has at the end of a run to send its remaining data."""

LAST_WORDS_OF_A_FAILED_RUN = 5.0
"""The same limit if the run was stopped or has failed: a launcher may kill the run soon."""

Row = dict[str, Any]
Write: TypeAlias = Callable[[int, dict[str, float]], None]
"""Writes what `step_and_values` returns."""


def step_and_values(row: Row) -> tuple[int, dict[str, float]]:
    """Split a row into its step and its numbers, by name: ``train/loss``, ``train/staleness/0``."""
    rest = {name: value for name, value in row.items() if name not in ("iteration", "split")}
    return row["iteration"], dict(_numbers(row.get("split", "train"), rest))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for part, inner in value.items():
            yield from _numbers(f"{name}/{part}", inner)
    elif isinstance(value, list):
        yield from _numbers(name, dict(enumerate(value)))
    elif isinstance(value, (int, float)):
        yield name, float(value)


@contextmanager
def wandb_sink(run_dir: Path) -> Iterator[Write]:
    """Weights & Biases: online with a key, else offline into the run directory.

    A run directory is one W&B run, even after restarts, because ``wandb/run-id`` keeps the run's
    id. All parts of an offline run have this id, and ``wandb sync`` joins them.
    """
    # Imported late: it is heavy, and optional.
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.login(prompt=False, verify=False):
        mode = "offline"
    known = run_dir / "wandb" / "run-id"
    run = wandb.init(
        id=known.read_text().strip() if known.is_file() else None,
        resume="allow",
        project=os.environ.get("WANDB_PROJECT", "maml"),
        name=run_dir.name,
        dir=str(run_dir),
        config=hyperparameters(run_dir),
        mode=mode,  # type: ignore[arg-type]
        settings=wandb.Settings(silent=True, init_timeout=60),
    )
    try:
        if not run.disabled:
            # Written after init, because init makes the folder.
            write_text(known, f"{run.id}\n")
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        # Log the step as a value, not as wandb's own step: a resumed run may repeat a step.
        yield lambda step, values: run.log({"iteration": step, **values})
    finally:
        run.finish()


def _abandon_wandb() -> None:
    """Kill the library's own process, because Python would wait for it at exit."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "wandb" in child.name():
                child.kill()
                child.wait(1.0)
    # At exit the library's handlers would miss that process and print errors: tear down now.
    if wandb := sys.modules.get("wandb"):
        with suppress(Exception):
            within(5.0, wandb.teardown, None)


@contextmanager
def tensorboard_sink(run_dir: Path) -> Iterator[Write]:
    """TensorBoard event files under the run directory."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run_dir / "tensorboard")) as writer:
        text = json.dumps(hyperparameters(run_dir), indent=4)
        writer.add_text("config", f"```\n{text}\n```")

        def write(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield write


def hyperparameters(run_dir: Path) -> dict[str, Any]:
    """Return every field of the configuration, and the rest of config.yaml as ``environment``."""
    content = saved.content_of(run_dir / "config.yaml")
    fields: dict[str, Any] = content.pop("config")
    return fields | {"environment": content}


SINKS = {"wandb": wandb_sink, "tensorboard": tensorboard_sink}


class RunLog:
    """A run's log, on rank zero; on other ranks every method does nothing."""

    @todist.rank_zero_only
    def __init__(self, run_dir: Path, config: Config) -> None:
        self._path, self._name = run_dir / "metrics.jsonl", config.logger
        self._rows: SimpleQueue[Row | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if sink := SINKS.get(config.logger):
            # A daemon, because it may hang in the library for ever but must not delay the exit.
            self._thread = threading.Thread(target=self._feed, args=(sink, run_dir), daemon=True)
            self._thread.start()

    def _feed(self, sink: Callable[[Path], AbstractContextManager[Write]], run_dir: Path) -> None:
        """Open the sink and feed it, in a thread, so that training never waits for the sink."""
        try:
            with sink(run_dir) as write:
                while (row := self._rows.get()) is not None:
                    write(*step_and_values(row))
        except Exception as error:
            # `close` has reported a sink that it left behind, so print nothing more.
            if self._thread is not None:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._say(f"{reason}; the run goes on, with metrics.jsonl alone")

    @todist.rank_zero_only
    def forget_after(self, iteration: int) -> None:
        """Drop the rows after ``iteration`` and all test rows: a resumed run writes them again."""
        keep_rows(self._path, lambda r: r["iteration"] <= iteration and r.get("split") != "test")

    @todist.rank_zero_only
    def write(self, row: Row) -> None:
        """Append one row to the file and hand it to the sink; errors as in `append_row`."""
        append_row(self._path, row)
        if self._thread is not None:
            self._rows.put(row)

    @todist.rank_zero_only
    def close(self, *, failed: bool = False) -> None:
        """Close the sink, if it still works; wait a limited time, less if the run ``failed``."""
        feed = self._thread
        if feed is None:
            return
        seconds = LAST_WORDS_OF_A_FAILED_RUN if failed else LAST_WORDS
        self._rows.put(None)
        feed.join(seconds)
        if feed.is_alive():
            self._thread = None
            _abandon_wandb()
            self._say(f"abandoned after {seconds:g} s without an end; metrics.jsonl has all rows")

    def _say(self, text: str) -> None:
        print(f"--logger {self._name}: {text}", file=sys.stderr, flush=True)
