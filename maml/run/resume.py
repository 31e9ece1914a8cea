"""Where a run begins: anew, or where a checkpoint ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maml.config import MUST_MATCH, Config, flag
from maml.errors import UserError
from maml.params import Params
from maml.run import checkpoint, directory


def choose_run_dir(config: Config) -> Path:
    """Return the run directory, once it is known that a ``--resume`` path is there."""
    if config.resume not in ("auto", "never") and not Path(config.resume).is_file():
        raise UserError(f"--resume {config.resume}: no such file (auto, never or a checkpoint)")
    return directory.choose(config)


def beginning(run_dir: Path, config: Config, params: Params) -> dict[str, Any] | None:
    """Return the content of the checkpoint to continue from, if any."""
    last = checkpoint.last_checkpoint(run_dir)
    kept = checkpoint.numbered_checkpoints(run_dir)
    if config.resume == "auto":
        # Without the last, but with others: its absence is an error, which names them.
        return _load(last, config, params) if last.exists() or kept else None
    path = Path(config.resume)
    of_this_run = config.resume != "never" and run_dir.resolve() in path.resolve().parents
    if (last.exists() or kept) and not of_this_run:
        raise UserError(
            f"--resume {config.resume}: {run_dir} already holds a run; choose another --run-dir"
        )
    return None if config.resume == "never" else _load(path, config, params)


def _load(path: Path, config: Config, params: Params) -> dict[str, Any]:
    """Return a checkpoint of the same run; refuse one that was made otherwise."""
    saved, default = checkpoint.load(path), Config()
    for name in MUST_MATCH:
        # What an earlier version did not have yet, it did as the default does.
        then, now = saved["config"].get(name, getattr(default, name)), getattr(config, name)
        if then != now:
            raise UserError(
                f"{flag(name)} is {now}, but {path} was made with {then}; give {flag(name)} {then},"
                " or --resume never and another --run-dir"
            )
    checkpoint.check_model(saved, params, str(path))
    if saved["iteration"] > config.iterations:
        raise UserError(
            f"--iterations {config.iterations}: {path} was made after {saved['iteration']}"
        )
    return saved
