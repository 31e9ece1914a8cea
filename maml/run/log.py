"""Where a run's numbers go: metrics.jsonl always, W&B or TensorBoard beside it.

Written by rank zero only. A sink beside the file may raise anything, and wait for anything: it says
so once and is left out from then on; the run goes on. It works in a thread of its own, so that a
server which does not answer holds up nobody.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import psutil
import torchopt.distributed as todist
import yaml

from maml.config import Config
from maml.processes.clock import within
from maml.run.files import append_line, read_rows, write_text

LAST_WORDS = 20.0
"""Seconds that a sink has at the end of a run to send what it holds."""

LAST_WORDS_OF_A_FAILED_RUN = 5.0
"""The same where the run was stopped or has failed: a launcher may kill it soon."""

Row = dict[str, Any]


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


class WandbSink:
    """Weights & Biases: online with a key, else offline into the run directory.

    A run directory is one run there, however often its training is started again: ``wandb/run-id``
    keeps its name. The parts of an offline run have it in common, and ``wandb sync`` joins them.
    """

    def __init__(self, run_dir: Path) -> None:
        # Imported late: it is heavy, and optional.
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if mode is None and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        known = run_dir / "wandb" / "run-id"
        self._run = wandb.init(
            id=known.read_text().strip() if known.is_file() else None,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "maml"),
            name=run_dir.name,
            dir=str(run_dir),
            config=hyperparameters(run_dir),
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, init_timeout=60),
        )
        if not self._run.disabled:
            # After init, which makes the folder where there is none.
            write_text(known, f"{self._run.id}\n")
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, row: Row) -> None:
        """Log one row."""
        step, values = step_and_values(row)
        # The step is a value, not wandb's own: a resumed run may log the same step again.
        self._run.log({"iteration": step, **values})

    def picture(self, name: str, path: Path, iteration: int) -> None:
        """Log a picture."""
        import wandb

        self._run.log({"iteration": iteration, name: wandb.Image(str(path))})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _abandon_wandb() -> None:
    """End the library's own process: Python's end would wait for it."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "wandb" in child.name():
                child.kill()
                child.wait(1.0)
    # What it has registered for Python's end would miss that process, and say so.
    if wandb := sys.modules.get("wandb"):
        with contextlib.suppress(Exception):
            within(5.0, wandb.teardown, None)


class TensorboardSink:
    """TensorBoard event files under the run directory."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        text = json.dumps(hyperparameters(run_dir), indent=4)
        self._writer.add_text("config", f"```\n{text}\n```")

    def write(self, row: Row) -> None:
        """Log one row."""
        step, values = step_and_values(row)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, name: str, path: Path, iteration: int) -> None:
        """Log a picture."""
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path)[..., :3], iteration, dataformats="HWC")

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


def hyperparameters(run_dir: Path) -> dict[str, Any]:
    """Return every field of the configuration, and as ``environment`` the rest of it."""
    content = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    own: dict[str, Any] = content.pop("config")
    return own | {"environment": content}


Sink: TypeAlias = WandbSink | TensorboardSink
SINKS: dict[str, Callable[[Path], Sink]] = {"wandb": WandbSink, "tensorboard": TensorboardSink}


class RunLog:
    """A run's log, on rank zero; on other ranks every method does nothing."""

    @todist.rank_zero_only
    def __init__(self, run_dir: Path, config: Config) -> None:
        self._path, self._name = run_dir / "metrics.jsonl", config.logger
        self._work: SimpleQueue[Callable[[Sink], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if make := SINKS.get(config.logger):
            # A daemon: it may hang in the library for ever, and must not hold up the process's end.
            self._thread = threading.Thread(target=self._feed, args=(make, run_dir), daemon=True)
            self._thread.start()

    def _feed(self, make: Callable[[Path], Sink], run_dir: Path) -> None:
        """Make the sink and feed it: whatever it waits for, training does not."""
        try:
            sink = make(run_dir)
            try:
                while (work := self._work.get()) is not None:
                    work(sink)
            finally:
                sink.close()
        except Exception as error:
            # A sink that was left behind has said all.
            if self._thread is not None:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                self._say(f"{reason}; the run goes on, with metrics.jsonl alone")

    @todist.rank_zero_only
    def forget_after(self, iteration: int) -> None:
        """Drop rows after ``iteration``, and of tests: a resumed run writes them again."""
        rows = read_rows(self._path)
        if not self._path.is_file():
            return
        kept = [r for r in rows if r["iteration"] <= iteration and r.get("split") != "test"]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        # Also where a crash cut the last line short: the next row would join it.
        if text.encode() != self._path.read_bytes():
            write_text(self._path, text)

    @todist.rank_zero_only
    def write(self, row: Row) -> None:
        """Append one row, in the file and beside it; errors: `append_line`."""
        append_line(self._path, json.dumps(row))
        if self.has_sink:
            self._work.put(lambda sink: sink.write(row))

    @property
    def has_sink(self) -> bool:
        """Whether pictures are wanted: the file takes none."""
        return self._thread is not None

    @todist.rank_zero_only
    def picture(self, name: str, path: Path, iteration: int) -> None:
        """Hand a picture to the sink, if there is one."""
        if self.has_sink:
            self._work.put(lambda sink: sink.picture(name, path, iteration))

    @todist.rank_zero_only
    def close(self, *, failed: bool = False) -> None:
        """Close the sink, if it still works; wait for it a while, less long if the run failed."""
        feed = self._thread
        if feed is None:
            return
        seconds = LAST_WORDS_OF_A_FAILED_RUN if failed else LAST_WORDS
        self._work.put(None)
        feed.join(seconds)
        if feed.is_alive():
            self._thread = None
            _abandon_wandb()
            self._say(f"not done after {seconds:g} s more, and left behind; metrics.jsonl has all")

    def _say(self, text: str) -> None:
        print(f"--logger {self._name}: {text}", file=sys.stderr, flush=True)
