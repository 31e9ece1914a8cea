"""The run directory: choose it, and read and write its configuration and status."""

import contextlib
import dataclasses
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from maml.config import Config, saved, user_path
from maml.config.checks import most_threads
from maml.config.presets import with_values
from maml.processes.identity import Identity, started
from maml.run import files
from maml.run.provenance import git_commit, machine, own_files, versions

OF_A_START = (
    "time", "iteration", "processes", "threads", "git_commit", "machine", "own_files",
)  # fmt: skip
"""Facts about a start that checkpoints and records keep, too: they hold no local paths."""


WRITTEN = (
    "checkpoints", "metrics.jsonl", "nonfinite", "nonfinite.jsonl", "wandb", "tensorboard",
)  # fmt: skip
"""What a training writes into: links in their place would lead elsewhere. Other files, it replaces
as a whole."""


def choose(config: Config) -> Path:
    """Return ``--run-dir``, else ``runs/<preset>-<time>``; make the directory if necessary.

    Raise UserError if it cannot be made or written, if its metrics.jsonl is damaged, or if a link
    leads out of it. It may itself be a link: its user has made that.
    """
    given = config.run_dir
    path = _default(config) if given is None else user_path("run_dir", given)
    files.refuse_links(path, *WRITTEN)
    for folder in (path, path / "checkpoints"):
        files.make_folder(folder, "--run-dir")
    # Check the rows before anything changes, because a run drops the rows after its beginning.
    files.read_rows(path / "metrics.jsonl")
    return path


def unmake(run_dir: Path) -> None:
    """Remove the directory of a run that was refused before it began, if nothing else is in it."""
    if not (run_dir / "config.yaml").exists():
        with contextlib.suppress(OSError):
            (run_dir / "checkpoints").rmdir()
            (run_dir / ".lock").unlink(missing_ok=True)
            run_dir.rmdir()


def _default(config: Config) -> Path:
    """Return the directory that an earlier start by this launcher made, else a new one."""
    began = time.time()
    with contextlib.suppress(psutil.Error):  # the launcher is gone, so this process ends soon
        began = psutil.Process(os.getppid()).create_time() if _launcher() else began
    name = f"{config.preset}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}"
    for n in itertools.count(1):
        path = Path("runs") / (name if n == 1 else f"{name}-{n}")
        if not path.exists() or is_restart(path):
            break
    return path


def is_restart(run_dir: Path) -> bool:
    """Return whether this process's launcher made the latest start of ``run_dir``, too."""
    launcher, starts = _launcher(), _starts(run_dir / "config.yaml")
    return launcher is not None and bool(starts) and starts[-1].get("launcher") == launcher


def _launcher() -> str | None:
    """Return the process that can restart this one (torchrun or launch/local), or None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    pid = os.getppid()
    return f"process {pid} of {platform.node()}, started at {started(pid)}"


def write_config(
    run_dir: Path,
    config: Config,
    begun: Sequence[dict[str, Any]] = (),
    device: str = "cpu",
    **here: Any,
) -> list[dict[str, Any]]:
    """Write ``config.yaml``: every field resolved, versions, the git commit, and all starts so far.

    ``here`` holds facts about this start. Earlier starts come from the directory, or else from a
    checkpoint's ``begun``. Return the facts `OF_A_START` of all starts, for checkpoints.
    """
    path = run_dir / "config.yaml"
    commit = git_commit()
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **here,
        "device": device,
        "machine": machine() | ({"gpu": None} if device == "cpu" else {}),
        "strategy": config.strategy,
        "git_commit": commit,
        "launcher": _launcher(),
        "command": [*sys.argv],  # a copy, because yaml writes an alias for one shared list
    }
    if own := own_files(config):
        start["own_files"] = own
    starts = [*(_starts(path) or begun), start]
    content = {
        "config": dataclasses.asdict(config),
        "versions": {"python": platform.python_version(), **versions()},
        "git_commit": commit,
        "command": sys.argv,
        "starts": starts,
    }
    files.write_text(path, yaml.safe_dump(content, sort_keys=False))
    return [{n: of[n] for n in OF_A_START if n in of} for of in starts]


def _starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts that a config.yaml lists; an empty list if it cannot be read."""
    try:
        content = saved.content_of(path)
        # YAML reads a bare date as a datetime, which no checkpoint can hold: make it text.
        content = json.loads(json.dumps(content, skipkeys=True, default=str))
    except (OSError, ValueError, RecursionError):
        return []
    starts = content.get("starts") if isinstance(content, dict) else None
    if not isinstance(starts, list):
        return []
    return [start for start in starts if isinstance(start, dict)]


def read_config(run_dir: Path, *, trust: bool = False) -> Config:
    """Return the configuration that ``run_dir`` was made with, as `saved.read` does."""
    return saved.read(run_dir / "config.yaml", trust=trust)


def config_here(run_dir: Path, data_root: str | None, device: str | None, *, trust: bool) -> Config:
    """Return `read_config`, changed to one process here with ``data_root`` and ``device``."""
    config = with_values(read_config(run_dir, trust=trust), strategy="local")
    here: dict[str, Any] = {"data_root": data_root, "device": device}
    config = with_values(config, **{n: v for n, v in here.items() if v is not None})
    if config.threads is not None and config.threads > most_threads():
        # The run's machine may have had more cores. Results do not depend on the threads.
        config = with_values(config, threads=None)
    return config


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON object to a file, indented for people."""
    files.write_text(path, json.dumps(content, indent=2) + "\n")


def write_status(run_dir: Path, state: str, iteration: int) -> None:
    """Write ``status.json``, which tells observers what the run is doing.

    The ``state`` is "training", "finished" (result.json exists), "stopped" (by a signal) or
    "failed". ``iteration`` is how many are done; if "stopped", how many the last checkpoint has.
    """
    content = {"state": state, "iteration": iteration, "process": Identity.own()._asdict()}
    files.write_text(run_dir / "status.json", json.dumps(content) + "\n")


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """Return what `write_status` wrote, or None; the state is "lost" if training was killed."""
    content = files.read_json(run_dir / "status.json", files.STATUS)
    if content.get("state") == "training":
        # An earlier version did not write the process.
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            if Identity(**content["process"]).is_gone():
                content["state"] = "lost"
    return content or None
