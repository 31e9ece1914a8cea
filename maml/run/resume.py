"""Where a run begins: anew, or where a checkpoint ended."""

import sys
from pathlib import Path
from typing import Any

from maml.config import MUST_MATCH, Config, flag, must_match
from maml.config.presets import spelled
from maml.errors import UserError
from maml.metagradient.outer_optimizer import OuterOptimizer
from maml.params import Params
from maml.run import checkpoint
from maml.run.files import read_rows, write_text


def beginning(run_dir: Path, config: Config, params: Params) -> dict[str, Any] | None:
    """Return the content of the checkpoint to continue from, if any; one of another run is refused.

    ``params`` have the names and shapes that it must have.
    """
    is_begun = checkpoint.is_begun(run_dir)
    if config.resume == "auto":
        return _newest(run_dir, config, params) if is_begun else None
    path, anew = Path(config.resume), config.resume == "never"
    if not anew and not path.is_file():
        raise UserError(f"--resume {path}: no such file (auto, never or a checkpoint)")
    if is_begun and (anew or run_dir.resolve() not in path.resolve().parents):
        raise UserError(
            f"--resume {config.resume}: {run_dir} already holds a run; choose another --run-dir"
        )
    if anew:
        return None
    saved = checkpoint.load(path)
    checkpoint.check_finite(saved, path)
    _check(saved, path, config, params)
    return saved


def bring_history(run_dir: Path, config: Config) -> None:
    """Let a run that another directory's checkpoint begins have the rows beside that, too."""
    rows = run_dir / "metrics.jsonl"
    if config.resume in ("auto", "never") or rows.exists():
        return
    for folder in list(Path(config.resume).absolute().parents)[:2]:
        if (folder / rows.name).is_file():
            read_rows(folder / rows.name)
            write_text(rows, (folder / rows.name).read_text(encoding="utf-8"))
            return


def _newest(run_dir: Path, config: Config, params: Params) -> dict[str, Any]:
    """Return the newest checkpoint that is whole; say so if damaged ones are set aside."""
    path, saved, damaged, aside = checkpoint.newest_intact(
        run_dir, lambda saved, path: _check(saved, path, config, params)
    )
    if damaged is not None:
        kept = f"; kept aside as {', '.join(each.name for each in aside)}" if aside else ""
        after = f"after iteration {saved['iteration']}"
        line = f"warning: {damaged}; going on from {path}, {after}{kept}"
        print(line, file=sys.stderr, flush=True)
    return saved


def _check(saved: dict[str, Any], path: Path, config: Config, params: Params) -> None:
    """Refuse a checkpoint, that of ``path``, which was made otherwise, or cannot go on."""
    # What an earlier version did not have yet, it did as the default does. It did not save all else
    # that must match by now.
    then = {name: getattr(Config(), name) for name in MUST_MATCH} | saved["config"]
    made_with = {name: then[name] for name in must_match(config) if name in then}
    others = {name: value for name, value in made_with.items() if value != getattr(config, name)}
    if others:
        name, value = next(iter(others.items()))
        more = f" ({len(others) - 1} more differ)" if others.keys() - {name} else ""
        raise UserError(
            f"{flag(name)} is {getattr(config, name)}, but {path} was made with {value}{more}; "
            f"give {spelled(others)}, or --resume never and another --run-dir"
        )
    checkpoint.check_model(saved, params, str(path))
    if saved["iteration"] > config.iterations:
        raise UserError(
            f"--iterations {config.iterations}: {path} was made after {saved['iteration']}"
        )
    try:
        OuterOptimizer(config, params).load_state_dict(saved["optimizer"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise checkpoint.DamagedError(
            f"{path}: its optimizer is damaged, or from another version of this program ({error}); "
            "--resume never and another --run-dir begin anew"
        ) from error
