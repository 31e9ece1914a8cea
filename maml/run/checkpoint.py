"""Checkpoints: each is one file of tensors and plain containers, never half-written.

A run's ``checkpoints/`` holds ``last.pt``, from which the run continues. It also holds the newest
few as ``iteration-00001000.pt``, for observers such as ``python -m maml.evaluate --watch``. The
newest of these and ``last.pt`` are one file with two names. Older checkpoints stay while they are
among those that validated best (`maml.evaluation.best`).
"""

import contextlib
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from datasets.whole import no_link, regular, sweep, written
from maml.errors import UserError
from maml.params import Params
from maml.run.files import Form, fits

FORMAT = 1


def _is_state(part: Any) -> bool:
    return isinstance(part, dict) and all(map(torch.is_tensor, part.values()))


PARTS: dict[str, Callable[[Any], bool]] = {
    "model": lambda part: _is_state(part) and all(map(torch.is_floating_point, part.values())),
    "optimizer": lambda part: isinstance(part, dict),
    "iteration": lambda part: isinstance(part, int) and part >= 0,
    "seconds": lambda part: isinstance(part, (int, float)) and 0 <= part < math.inf,
    "config": lambda part: isinstance(part, dict),
}
"""The parts of a checkpoint, each with a function that checks a value of this part."""

FURTHER: dict[str, Form] = {
    "guard": {"beginning": float | int | None, "loss": float | int, "far": [int]},
    "best": {"iteration": int, "score": (float, [float | int]), "model": {str: Tensor}},
    "starts": [dict],
    "own_files": {str: {str: str}},
}
"""The forms (`maml.run.files`) of further parts; such a part may be missing or empty."""


class DamagedError(UserError):
    """A checkpoint is damaged or missing; another checkpoint of the same run may be whole."""


def last_checkpoint(run_dir: Path) -> Path:
    """Return the path of a run's newest checkpoint, whether or not it exists."""
    return run_dir / "checkpoints" / "last.pt"


def numbered_checkpoint(run_dir: Path, iteration: int) -> Path:
    """Return the path of a run's checkpoint after ``iteration``, whether or not it exists."""
    return run_dir / "checkpoints" / f"iteration-{iteration:08d}.pt"


def numbered_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return the checkpoints that a run keeps, by iteration, the oldest first."""
    try:
        names = os.listdir(run_dir / "checkpoints")
    except OSError:
        return {}
    matches = (re.fullmatch(r"iteration-(\d{8,})\.pt", name) for name in names)
    iterations = sorted(int(match[1]) for match in matches if match)
    return {iteration: numbered_checkpoint(run_dir, iteration) for iteration in iterations}


def is_begun(run_dir: Path) -> bool:
    """Return whether a run has checkpoints, whole or damaged."""
    return last_checkpoint(run_dir).exists() or bool(numbered_checkpoints(run_dir))


def save_in(run_dir: Path, content: dict[str, Any]) -> None:
    """Save a run's newest checkpoint: first ``last.pt``, so no work is lost, then numbered."""
    last, path = last_checkpoint(run_dir), numbered_checkpoint(run_dir, content["iteration"])
    save(last, content)
    try:
        with written(path) as temporary:
            temporary.unlink()
            os.link(last, temporary)
    except OSError:
        # Not every shared folder supports hard links.
        save(path, content)


def remove(run_dir: Path, which: Callable[[int], bool]) -> None:
    """Remove the numbered checkpoints of the iterations for which ``which`` is true."""
    for iteration, path in numbered_checkpoints(run_dir).items():
        if which(iteration):
            with contextlib.suppress(OSError):  # a file that cannot be removed stays
                path.unlink()


def save(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` whole or not at all; raise UserError if that fails (a full disk)."""
    try:
        no_link(path.parent).mkdir(parents=True, exist_ok=True)
        # Leftovers of processes killed while saving: only one process saves in a run.
        sweep(path.with_name("*.pt"))
        with written(path) as temporary, open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
    except (OSError, RuntimeError) as error:
        # torch reports a failed write as RuntimeError.
        kept = "; the earlier checkpoint is untouched" if path.exists() else ""
        raise UserError(f"{path}: cannot write the checkpoint: {_reason(error)}{kept}") from error


def check_finite(content: dict[str, Any], path: Path) -> None:
    """Raise `DamagedError` for NaN or inf: such a weight would never move again, unnoticed."""
    for part in ("model", "optimizer", "best"):
        tensors = filter(torch.is_tensor, pytree.tree_leaves(content.get(part)))
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise DamagedError(f"{path}: its {part} holds numbers that are not finite")


def tested(content: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's content with the model that the run tests, and its iteration."""
    best: dict[str, Any] = content.get("best") or {}
    return content | {name: best[name] for name in ("model", "iteration") if best}


def load_parameters(path: Path) -> tuple[Params, str]:
    """Return the parameters of a checkpoint or a ``state_dict``, and the key that held them."""
    content = _content(path, older=True)
    if isinstance(content, dict) and "model" in content and "format" in content:
        return dict(load(path)["model"]), ""
    if _is_state(content) and content:
        return dict(content), ""
    parts = content if isinstance(content, dict) else {}
    states = {key: part for key, part in parts.items() if part and _is_state(part)}
    if not states:
        raise UserError(f"{path}: neither a checkpoint nor a state_dict of tensors")
    key = next(iter(states)) if len(states) == 1 else "state_dict"
    if key not in states:
        raise UserError(
            f"{path}: holds tensors under {', '.join(map(str, states))}; save only those that you "
            "want to load"
        )
    return dict(states[key]), str(key)


def _content(path: Path, older: bool = False) -> Any:
    """Return the content of a file that torch saved, tensors on the CPU; errors as in `load`.

    ``older``: the file may have torch's older format, which has no checksums.
    """
    try:
        is_zip = zipfile.is_zipfile(regular(path)) or not older
        # torch ignores the checksums that it writes, so a damaged weight would go unnoticed.
        with zipfile.ZipFile(path) if is_zip else contextlib.nullcontext() as archive:
            if archive and (damaged := archive.testzip()):
                raise DamagedError(f"{path}: not a readable checkpoint: {damaged} in it is damaged")
        with warnings.catch_warnings():
            # These warnings are about files that are refused below anyway.
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
        tensors = filter(torch.is_tensor, pytree.tree_leaves(content))
        if any(t.layout != torch.strided or t.is_meta or t.is_quantized for t in tensors):
            raise DamagedError(f"{path}: not a readable checkpoint: a tensor in it is not dense")
        return content
    except UserError:
        raise
    except FileNotFoundError:
        raise DamagedError(f"{path}: no such checkpoint") from None
    except (PermissionError, IsADirectoryError, MemoryError) as error:
        raise UserError(f"{path}: not a readable checkpoint: {_reason(error)}") from error
    except pickle.UnpicklingError as error:
        # torch's own message advises the user to run the code in the file.
        reason = "it holds other things than tensors and plain containers"
        raise DamagedError(f"{path}: not a readable checkpoint: {reason}") from error
    except Exception as error:
        # Damaged bytes can raise any error in the unpickler: KeyError, struct.error, IndexError …
        raise DamagedError(f"{path}: not a readable checkpoint: {_reason(error)}") from error


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, tensors on the CPU, without running any code it may hold.

    A missing, damaged or incomplete file raises `DamagedError`; another format, a UserError.
    """
    content = _content(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not a checkpoint of this project (format {FORMAT})")
    if missing := [part for part in PARTS if part not in content]:
        raise DamagedError(f"{path}: an incomplete checkpoint, without {', '.join(missing)}")
    wrong = [part for part, whole in PARTS.items() if not whole(content[part])]
    others = {part: content[part] for part in FURTHER if content.get(part, {}) != {}}
    wrong += [part for part, value in others.items() if not fits(value, FURTHER[part])]
    if wrong:
        raise DamagedError(f"{path}: not a checkpoint of this project: its {wrong[0]} is not valid")
    return content


def form_of(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape for a message: ``float32 [5, 64]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_model(content: dict[str, Any], params: Params, what: str) -> None:
    """Raise UserError if a checkpoint's model has other parameter names, shapes or dtypes."""
    model = content["model"]
    for name in dict.fromkeys([*params, *model]):
        here, there = (form_of(of[name]) if name in of else "none" for of in (params, model))
        if here != there:
            raise UserError(
                f"{what}: its model is another network's or version's: {name} is {there} there,"
                f" {here} here"
            )


def check_division(content: dict[str, Any], division: str | None, run_dir: Path) -> None:
    """Raise UserError if a checkpoint learned from other classes than the training split has."""
    then = content.get("division")
    if then is not None and division is not None and then != division:
        raise UserError(
            f"{run_dir}: it was trained on other classes than the training split has now, so that "
            "a test could be on classes that it learned from; put the folder back as it was, or "
            "divide it into train, validation and test yourself and train anew"
        )


def _reason(error: Exception) -> str:
    for each in (error, error.__context__):
        if isinstance(each, OSError) and each.strerror:
            return each.strerror
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
