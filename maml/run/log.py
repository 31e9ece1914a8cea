"""Where a run's numbers go: metrics.jsonl always, W&B or TensorBoard beside it.

Written by rank zero only. A sink beside the file may fail at any time: it says so once and is
left out from then on; the run goes on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torchopt.distributed as todist

from maml.config import Config
from maml.run.files import append_line, read_rows, write_text

Row = dict[str, Any]


class Sink(Protocol):
    """Takes rows of numbers; may raise anything."""

    def write(self, row: Row) -> None:
        """Take one row; its ``iteration`` is the step."""

    def close(self) -> None:
        """Flush and let go."""


def step_and_values(row: Row) -> tuple[int, dict[str, float]]:
    """Split a row into its step and its numbers, named ``<split>/<metric>``."""
    split = row.get("split", "train")
    values = {
        f"{split}/{name}": float(value)
        for name, value in row.items()
        if name not in ("iteration", "split") and isinstance(value, (int, float))
    }
    return row["iteration"], values


class WandbSink:
    """Weights & Biases: online with a key, else offline into the run directory.

    A run directory is one run there, however often its training is started again: ``wandb/run-id``
    keeps its name. The parts of an offline run have it in common, and ``wandb sync`` joins them.
    """

    def __init__(self, run_dir: Path, config: Config) -> None:
        # Imported late: it is heavy, and optional.
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if mode is None and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        settings = wandb.Settings(silent=True, init_timeout=60)
        known = run_dir / "wandb" / "run-id"
        self._run = wandb.init(
            id=known.read_text().strip() if known.is_file() else None,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "maml"),
            name=run_dir.name,
            dir=str(run_dir),
            config=dataclasses.asdict(config),
            mode=mode,  # type: ignore[arg-type]
            settings=settings,
        )
        # After init, which makes the folder where there is none.
        write_text(known, f"{self._run.id}\n")
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, row: Row) -> None:
        """Log one row."""
        step, values = step_and_values(row)
        # The step is a value, not wandb's own: a resumed run may log the same step again.
        self._run.log({"iteration": step, **values})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TensorboardSink:
    """TensorBoard event files under the run directory."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, row: Row) -> None:
        """Log one row."""
        step, values = step_and_values(row)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


SINKS: dict[str, Callable[[Path, Config], Sink]] = {
    "wandb": WandbSink,
    "tensorboard": TensorboardSink,
}


class RunLog:
    """A run's log, on rank zero; on other ranks every method does nothing."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._sink: Sink | None = None
        self._sink_name = config.logger
        self._open(run_dir, config)

    @todist.rank_zero_only
    def _open(self, run_dir: Path, config: Config) -> None:
        make = SINKS.get(config.logger)
        if make is not None:
            self._guard(lambda: setattr(self, "_sink", make(run_dir, config)))

    @todist.rank_zero_only
    def forget_after(self, iteration: int) -> None:
        """Drop rows after ``iteration``: a resumed run writes them again.

        Raises:
            UserError: as `read_metrics`, and then nothing is dropped.
        """
        rows = read_metrics(self._path)
        if not self._path.is_file():
            return
        kept = "".join(json.dumps(row) + "\n" for row in rows if row["iteration"] <= iteration)
        # Also where a crash cut the last line short: the next row would join it.
        if kept.encode() != self._path.read_bytes():
            write_text(self._path, kept)

    @todist.rank_zero_only
    def has(self, iteration: int, split: str) -> bool:
        """Return whether there is an evaluation of ``split`` at ``iteration``; on rank zero."""
        return any(
            row["iteration"] == iteration and row.get("split") == split
            for row in read_metrics(self._path)
        )

    @todist.rank_zero_only
    def write(self, row: Row) -> None:
        """Append one row.

        Raises:
            UserError: if metrics.jsonl cannot be written.
        """
        append_line(self._path, json.dumps(row))
        sink = self._sink
        if sink is not None:
            self._guard(lambda: sink.write(row))

    @todist.rank_zero_only
    def close(self) -> None:
        """Close the sink, if it still works."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._guard(sink.close)

    def _guard(self, action: Callable[[], object]) -> None:
        """Run ``action`` of the sink; if it fails in any way, go on without the sink."""
        try:
            action()
        except Exception as error:
            self._sink = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(
                f"--logger {self._sink_name}: {reason}; the run goes on, with metrics.jsonl alone",
                file=sys.stderr,
            )


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl, if there is one, but for a last line cut short.

    Raises:
        UserError: naming the file, if it cannot be read or another line is no row.
    """
    return read_rows(path)
