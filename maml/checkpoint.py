"""Checkpoints: one file of tensors and plain containers, never half-written."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from maml.errors import UserError

FORMAT = 1
PARTS = ("model", "optimizer", "iteration", "seconds", "config")


def last_checkpoint(run_dir: Path) -> Path:
    """Return where a run's newest checkpoint is, whether or not it exists."""
    return run_dir / "checkpoints" / "last.pt"


def save(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` under a temporary name, then rename: a reader sees all of it or none.

    Raises:
        UserError: if the file cannot be written (a full disk, say); the earlier one stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        # What processes killed while saving have left; only one process saves in a run.
        for stale in path.parent.glob(f".{path.name}.*.tmp"):
            stale.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        # torch reports a failed write as RuntimeError.
        with contextlib.suppress(OSError):
            temporary.unlink()
        kept = "; the earlier checkpoint is untouched" if path.exists() else ""
        raise UserError(f"{path}: cannot write the checkpoint: {_reason(error)}{kept}") from error


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, tensors on the CPU, without running any code it may hold.

    Raises:
        UserError: if it is missing, damaged or of another format.
    """
    try:
        with warnings.catch_warnings():
            # About the bytes of a file that is refused below anyway.
            warnings.simplefilter("ignore")
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint") from None
    except Exception as error:
        # Damaged bytes lead the unpickler anywhere: KeyError, struct.error, IndexError …
        raise UserError(f"{path}: not a readable checkpoint: {_reason(error)}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not a checkpoint of this project (format {FORMAT})")
    if missing := [part for part in PARTS if part not in content]:
        raise UserError(f"{path}: an incomplete checkpoint, without {', '.join(missing)}")
    return content


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    cause = error.__context__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
