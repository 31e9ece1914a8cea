"""The run directory: where it is, what it was made with, and how its files are written."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from maml.config import Config, saved, user_path
from maml.config.checks import most_threads
from maml.config.presets import with_values
from maml.errors import UserError
from maml.processes.identity import Identity
from maml.processes.job import continues, this_job
from maml.run.files import read_rows, write_even_full, write_text
from maml.run.lock import Lock
from maml.run.provenance import git_commit, machine, own_files, versions

GONE = 5.0
"""Seconds that a killed process takes at most to give back what it had."""

OF_A_START = (
    "time", "iteration", "processes", "threads", "git_commit", "machine", "own_files",
)  # fmt: skip
"""What is said of a start beyond its run directory: nothing of one machine's own."""

STATUS = {"state", "iteration", "start", "checkpoint_every", "keep_checkpoints"}


def choose(config: Config, made: list[Path] | None = None) -> Path:
    """Return ``--run-dir``, else ``runs/<preset>-<time>``, made if need be.

    Without the flag, a job that is started again goes on in the directory that it began.

    Args:
        config: The configuration.
        made: The directories that were made are added to it, for `unmake`.

    Raises:
        UserError: if the directory cannot be made or written, or its metrics.jsonl is damaged.
    """
    begun = _begun_by_this_job(config) if config.run_dir is None else None
    default = f"runs/{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(default) if config.run_dir is None else user_path("run_dir", config.run_dir)
    made = [] if made is None else made
    try:
        _make(path.parent, made)
        if begun is not None:
            path = begun
        elif config.run_dir is None:
            path = _make_new(path)
            made.append(path)
        _make(path / "checkpoints", made)
    except OSError as error:
        raise UserError(f"--run-dir {path}: {_in_the_way(path) or error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"--run-dir {path}: not writable")
    # Before anything there is changed: a run drops the rows after its beginning.
    read_rows(path / "metrics.jsonl")
    return path


def _make(path: Path, made: list[Path]) -> None:
    """Make a directory and its parents; add those that were not there to ``made``."""
    for part in (*reversed(path.parents), path):
        if not part.is_dir():
            part.mkdir(exist_ok=True)
            made.append(part)


def unmake(run_dir: Path, made: list[Path]) -> None:
    """Remove the directories that were made for a run which was refused before it began."""
    if (run_dir / "config.yaml").exists():
        return
    if run_dir in made:
        (run_dir / ".lock").unlink(missing_ok=True)
    for path in reversed(made):
        with contextlib.suppress(OSError):  # whoever else put something there keeps it
            path.rmdir()


def _begun_by_this_job(config: Config) -> Path | None:
    """Return the newest run that this command has begun at an earlier start of this job."""
    if not this_job() or config.resume != "auto":
        return None
    begun = []
    for path in Path("runs").glob(f"{glob.escape(config.preset)}-*/config.yaml"):
        last = (_starts(path) or [{}])[-1]
        job = last.get("job")
        same = isinstance(job, dict) and continues(job) and last.get("command") == sys.argv
        if same and not Lock.is_held(path.parent):
            begun.append(path)
    return max(begun, key=lambda path: path.stat().st_mtime).parent if begun else None


def _in_the_way(path: Path) -> str:
    """Say what exists where a directory is to be made, if anything."""
    for part in (*reversed(path.parents), path, path / "checkpoints"):
        if part.is_symlink() and not part.exists():
            return f"{part} is a link to nothing"
        if part.exists() and not part.is_dir():
            return f"{part} is a file"
    return ""


def _make_new(path: Path) -> Path:
    """Make ``path``, or ``path-2`` and so on where a run of the same second has it already."""
    for n in itertools.count(1):
        candidate = path if n == 1 else path.with_name(f"{path.name}-{n}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise AssertionError


def around(path: Path) -> list[Path]:
    """Return the folders of which a checkpoint may be: a record, or a run directory above it."""
    return list(path.absolute().parents)[:2]


def write_config(
    run_dir: Path,
    config: Config,
    *,
    iteration: int = 0,
    processes: int = 1,
    threads: int | None = None,
    device: str = "cpu",
    begun: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Write ``config.yaml``: every field resolved, with versions and the git commit.

    Those are of this start; ``starts`` tells of all starts, the last one at the end. Return what a
    checkpoint has of these: `OF_A_START`.

    Args:
        run_dir: The run directory.
        config: The configuration.
        iteration: Where this start began.
        processes: How many of them there are, on all hosts.
        threads: How many of rank 0 compute.
        device: What rank 0 computes on.
        begun: The earlier starts that the run's checkpoint tells of. They count where the run
            directory has none of its own.
    """
    path = run_dir / "config.yaml"
    commit = git_commit()
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "iteration": iteration,
        "processes": processes,
        "threads": threads,
        "device": device,
        "machine": machine() if device.startswith("cuda") else machine() | {"gpu": None},
        "strategy": config.strategy,
        "git_commit": commit,
        "job": this_job(),
        "command": sys.argv,
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
    write_text(path, yaml.dump(content, Dumper=_Plain, sort_keys=False))
    return [{n: of[n] for n in OF_A_START if n in of} for of in starts]


class _Plain(yaml.SafeDumper):
    """Says twice what is there twice, without anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _starts(path: Path) -> list[dict[str, Any]]:
    """Return the starts that a config.yaml tells of; none where it cannot be read."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return []
    starts = content.get("starts") if isinstance(content, dict) else None
    if not isinstance(starts, list):
        return []
    return [start for start in starts if isinstance(start, dict)]


def environment(run_dir: Path) -> dict[str, Any]:
    """Return what the latest start of a run was made with, as config.yaml tells it."""
    path = run_dir / "config.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    start = content["starts"][-1]
    return {
        "versions": content["versions"],
        "git_commit": content["git_commit"],
        "host": platform.node(),
        "cores": os.cpu_count(),
        "device": start["device"],
        "processes": start["processes"],
        "restarts": len(content["starts"]) - 1,
    }


def read_config(run_dir: Path, *, trust: bool = False) -> Config:
    """Return the configuration that ``run_dir`` was made with; ``trust``, errors: `saved.read`."""
    return saved.read(run_dir / "config.yaml", trust=trust)


def config_here(run_dir: Path, data_root: str | None, device: str | None, *, trust: bool) -> Config:
    """Return `read_config` for one process of this machine, which may differ from the run's own.

    Args:
        run_dir: The run directory.
        data_root: Where the data sets are here; None: as in the run.
        device: What to compute on here; None: as in the run.
        trust: As for `read_config`.

    Raises:
        UserError: as `read_config`.
    """
    here = {"data_root": data_root, "device": device}
    given = {name: value for name, value in here.items() if value is not None}
    config = with_values(read_config(run_dir, trust=trust), strategy="local", **given)
    if config.threads is not None and config.threads > most_threads():
        # As many as the run's machine had cores for, perhaps; results do not depend on it.
        config = with_values(config, threads=None)
    return config


def write_classes(run_dir: Path, classes: dict[str, list[str]]) -> None:
    """Write ``classes.json``: the names of each split's classes."""
    text = json.dumps(classes, indent=2, ensure_ascii=False)
    write_text(run_dir / "classes.json", text + "\n")


def write_result(run_dir: Path, result: dict[str, Any]) -> None:
    """Write ``result.json``."""
    write_text(run_dir / "result.json", json.dumps(result, indent=2) + "\n")


def read_result(run_dir: Path) -> dict[str, Any]:
    """Return what ``result.json`` holds; empty while it cannot be read."""
    return read_json(run_dir / "result.json")


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file of one JSON object holds; empty while it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_status(run_dir: Path, state: str, iteration: int, start: int, config: Config) -> None:
    """Write ``status.json``: what the run is doing, for whoever looks on from outside.

    Args:
        run_dir: The run directory.
        state: "training", "finished" (result.json is there), "stopped" (by a signal) or "failed".
            What is "training" is so while its process lives: see `read_status`.
        iteration: Iterations done by now; of a finished or stopped run, its last checkpoint's.
        start: The iteration at which this training began: 0, or what it continued from.
        config: Of which it holds how often checkpoints are made, and how many are kept.
    """
    content = {
        "state": state,
        "iteration": iteration,
        "start": start,
        "checkpoint_every": config.checkpoint_every,
        "keep_checkpoints": config.keep_checkpoints,
        "process": Identity.own()._asdict(),
    }
    write_even_full(run_dir / "status.json", json.dumps(content) + "\n")


def lose(run_dir: Path) -> None:
    """Note that the process which trained into ``run_dir`` was lost, if it can be seen from here.

    It is on another host, perhaps, and its directory there.
    """
    status = read_status(run_dir)
    if status is None or status["state"] not in ("training", "lost"):
        return
    # A process that was killed a moment ago may still be on its way out.
    deadline = time.monotonic() + GONE
    while Lock.is_held(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not Lock.is_held(run_dir):
        write_even_full(run_dir / "status.json", json.dumps(status | {"state": "failed"}) + "\n")


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """Return what `write_status` wrote; None where it is not there (yet).

    The state is "lost" where it was "training" and the process is known to be gone: it was killed.
    Of a process on another host nothing is known.
    """
    try:
        content = json.loads((run_dir / "status.json").read_text())
    except (OSError, ValueError):
        return None
    if not (isinstance(content, dict) and content.keys() >= STATUS):
        return None
    if content["state"] == "training":
        # An earlier version did not write it.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            if Identity(**content["process"]).is_gone():
                content["state"] = "lost"
    return content
