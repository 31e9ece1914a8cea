"""``python -m launch.record RUN_DIR``: keep the record of a finished run, for the tables.

    python -m launch.record runs/omniglot-5w1s

The command tests the run's tested model again: it must score what the run wrote. For the files of
a record see `maml.studies.recorded`.
"""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from maml.config import FLAGS, OF_A_HOST, Config, registry, saved
from maml.config.parser import Parser, add_trust, at_least
from maml.config.presets import PRESETS, changed, differing, published_row, spelled
from maml.errors import UserError
from maml.evaluation.best import RECORDED, load_best
from maml.evaluation.scores import evaluate, with_headline
from maml.params import Params
from maml.run import checkpoint, directory, files
from maml.run.files import RESULT, START, TESTED, misfit
from maml.run.provenance import describe, digest_of
from maml.run.reading import Run
from maml.strategies.local import alone
from maml.studies import recorded

PLACES = ("run_dir", "data_root", "resume")
"""Flags that name paths of one machine."""
KEPT = {"versions": dict, "git_commit": str}
"""The entries of a run's config.yaml that a record keeps in addition to the configuration."""
ROWS = 200
"""Keep at least this many training rows, if there are so many, and all other rows."""


def main(arguments: list[str]) -> int:
    """Write the record of a run."""
    parser = Parser(prog="python -m launch.record", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    text = "differences from the published protocol that no flag shows"
    parser.add_argument("--note", default="", help=text)
    text = "test the K kept checkpoints that validated best together, too"
    parser.add_argument("--ensemble", metavar="K", type=at_least(2), help=text)
    parser.add_argument("--records", type=Path, default=recorded.RECORDS, help="where it goes")
    parser.add_argument("--data-root", help="where the data sets are (default: as in the run)")
    add_trust(parser, "the run's config.yaml")
    options = parser.parse_args(arguments)
    print(f"record {write(**vars(options))}")
    return 0


def write(
    run_dir: Path,
    records: Path,
    note: str = "",
    data_root: str | None = None,
    ensemble: int | None = None,
    *,
    trust: bool = False,
) -> Path:
    """Write the record of a run below ``records``, replacing an earlier one; return its folder.

    The arguments are the command's. Raise UserError if the run has not finished, has no test, was
    made with uncommitted changes, or does not score what it says; an earlier record then stays.
    """
    config = directory.read_config(run_dir)
    here = directory.config_here(run_dir, data_root, None, trust=trust)
    registry.import_theirs(here)
    content = saved.content_of(run_dir / "config.yaml")
    starts = _starts(run_dir, content)
    status = directory.read_status(run_dir)
    if status is None or status["state"] != "finished":
        raise UserError(
            f"{run_dir}: it has not finished; the same command with --run-dir {run_dir} goes on"
        )
    if not config.test_tasks:
        raise UserError(f"{run_dir}: it was not tested (--test-tasks 0), so there is no result")
    run = Run(run_dir, here)
    # Published values come from this commit's presets, which may be newer than the run's.
    result = files.read_object(run_dir / "result.json", RESULT)
    result |= published_row(config) | {"changed": changed(config)}
    if wrong := recorded.other_means(run):
        raise UserError(f"{run_dir / 'result.json'}: not what {TESTED} says: {wrong}")
    if ensemble is not None:
        result |= _ensemble(here, run_dir, ensemble, result["tasks"])
    last = checkpoint.load(checkpoint.last_checkpoint(run_dir))
    made = {
        "command": _again(config, starts[-1]),
        "starts": starts,
        "minutes": last["seconds"] / 60,
        "hardware": describe(torch.get_num_threads()) | starts[-1].get("machine", {}),
        "note": note,
    }
    if last.get("division") is not None:
        made["division"] = last["division"]
    target, model = records / recorded.place_of(config), checkpoint.tested(last)["model"]
    files.make_folder(records, "--records")
    with tempfile.TemporaryDirectory(dir=records, prefix=".") as made_in:
        folder = Path(made_in) / target.name
        folder.mkdir()
        _write(folder, run_dir, content, made, model)
        files.write_text(folder / "result.json", json.dumps(result, indent=1) + "\n")
        recorded.read(folder)  # fails now, not later, if the record cannot be read
        if wrong := recorded.retested(run, model, result["tasks"]):
            raise UserError(f"{run_dir}: its model does not score what it says: {wrong}")
        files.make_folder(target.parent, "--records")
        if target.exists():
            target.rename(Path(made_in) / "earlier")
        folder.rename(target)
    return target


def _starts(run_dir: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a run's starts (time, commit, …) from its config.yaml, or raise a UserError."""
    if wrong := misfit(content, KEPT | {"starts": [START]}):
        raise UserError(f"{run_dir / 'config.yaml'}: damaged: its {wrong}")
    starts = content["starts"]
    for start in starts:
        commit = start.get("git_commit")
        if not commit or commit.endswith("-dirty"):
            raise UserError(f"{run_dir}: made by {commit}: not a commit without changes")
    if begun_after := starts[0]["iteration"]:
        raise UserError(
            f"{run_dir}: it goes on from a checkpoint after iteration {begun_after} that "
            "does not say how the run began"
        )
    return [{n: of[n] for n in directory.OF_A_START if n in of} for of in starts]


def _ensemble(config: Config, run_dir: Path, count: int, tasks: int) -> dict[str, Any]:
    """Return the scores of the best ``count`` checkpoints together, as ``ensemble_<name>``."""
    saved = load_best(run_dir, count, transductive=config.transductive)
    models = [one["model"] for one in saved]
    result = evaluate(alone(config), models, "test", tasks, progress=True)
    result = with_headline(result, transductive=config.transductive)
    scores = {f"ensemble_{name}": result[name] for name in result if name not in ("split", "tasks")}
    return {"ensemble": [one["iteration"] for one in saved]} | scores


def _again(config: Config, start: dict[str, Any]) -> str:
    """Return the command that repeats a run; processes and threads matter for float32 rounding."""
    # If the run has no preset, the command reads the config.yaml that the record keeps.
    flags, preset = "--config config.yaml", PRESETS.get(config.preset)
    if preset is not None:
        # The number of iterations follows from --epochs.
        here = {*OF_A_HOST, *PLACES, *(("iterations",) if config.epochs is not None else ())}
        other = differing(config, preset, [name for name in FLAGS if name not in here])
        flags = f"{config.preset} {spelled(other)}".rstrip()
    processes, threads = start.get("processes", 1), start.get("threads", config.threads)
    program = "launch/local" if processes > 1 else "python train_maml.py"
    several = f" --workers {processes}" if processes > 1 else ""
    return f"{program} {flags}{several}" + (f" --threads {threads}" if threads else "")


def _write(
    folder: Path, run_dir: Path, content: dict[str, Any], made: dict[str, Any], model: Params
) -> None:
    """Write a record's files; leave out the entries of config.yaml that belong to one machine."""
    kept = folder / RECORDED
    torch.save(model, kept)
    made |= {"model_sha256": digest_of(kept), "model_bytes": kept.stat().st_size}
    if made["model_bytes"] > recorded.MOST_BYTES:
        kept.unlink()
    files.write_text(folder / "record.json", json.dumps(made, indent=1) + "\n")
    shutil.copy(run_dir / TESTED, folder / TESTED)
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(run_dir / "curves.png", folder / "curves.png")
    config = {name: v for name, v in content["config"].items() if name not in PLACES}
    shown = {"config": config} | {name: content[name] for name in KEPT}
    files.write_text(folder / "config.yaml", yaml.safe_dump(shown, sort_keys=False))
    rows = files.read_rows(run_dir / "metrics.jsonl")
    training = [i for i, row in enumerate(rows) if "split" not in row]
    every = max(1, len(training) // ROWS)
    left_out = {*training} - {*training[every - 1 :: every]}
    lines = [f"{json.dumps(row)}\n" for i, row in enumerate(rows) if i not in left_out]
    files.write_text(folder / "metrics.jsonl", "".join(lines))
