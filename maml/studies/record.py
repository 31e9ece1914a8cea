"""``python -m launch.record RUN_DIR``: keep what a table shows of a finished run.

    python -m launch.record runs/omniglot-5w1s --tasks 2000

The model that the run has tested is tested again, on as many tasks as are asked for, and must score
what the run itself has written. Of a run that was stopped, the record says how far it came. What
stays is in `maml.studies.recorded`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from datasets.spelling import is_theirs
from maml.best import load_best
from maml.config import OF_A_HOST, Config, registry
from maml.config.parser import Parser, add_trust, whole_number
from maml.config.presets import changed, published_row
from maml.errors import UserError
from maml.params import Params
from maml.run import checkpoint, directory, files
from maml.run.provenance import describe, digest_of
from maml.run.task_scores import NAME, read_tasks, write_tasks
from maml.scores import ensemble, with_headline
from maml.studies import recorded
from maml.studies.check_record import alone, differing, scores_of

PLACES = ("run_dir", "data_root", "resume")
"""Flags that name places of one machine."""
KEPT = {"versions": dict, "git_commit": str}
"""What is kept of a run's config.yaml beside the configuration."""
ROWS = 200
"""Training rows that stay; all of validation and test do."""


def main(arguments: list[str]) -> int:
    """Write the record of a run."""
    parser = Parser(prog="python -m launch.record", description="Keep the record of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument(
        "--tasks", type=whole_number, default=2000, help="test tasks to keep (default: 2000)"
    )
    parser.add_argument(
        "--note", default="", help="what differs from the published protocol, beside the flags"
    )
    parser.add_argument(
        "--ensemble",
        metavar="K",
        type=whole_number,
        help="test the K kept checkpoints that validated best together, too",
    )
    parser.add_argument("--records", type=Path, default=recorded.RECORDS, help="where it goes")
    parser.add_argument("--data-root", help="where the data sets are (default: as in the run)")
    add_trust(parser, "the run's config.yaml")
    options = parser.parse_args(arguments)
    for name, least in (("tasks", 1), ("ensemble", 2)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: give at least {least}")
    folder = write(
        options.run_dir,
        options.records,
        options.tasks,
        options.note,
        options.data_root,
        options.ensemble,
        trust=options.trust,
    )
    print(f"record {folder}")
    return 0


def write(
    run_dir: Path,
    records: Path,
    tasks: int,
    note: str,
    data_root: str | None,
    together: int | None = None,
    *,
    trust: bool = False,
) -> Path:
    """Write the record of ``run_dir`` below ``records``, in place of an earlier one; return it.

    A run that has ended before its last iteration has no test yet. Its record says how far it came,
    and has the checkpoint to go on from.

    Args:
        run_dir: A run that nobody trains now.
        records: Where its folder goes.
        tasks: Test tasks to keep.
        note: What differs from the published protocol, beside the flags.
        data_root: Where the data sets are; None: as in the run.
        together: How many checkpoints make an ensemble; None: there is none.
        trust: Whether to import the components of a user's own that the run names.

    Raises:
        UserError: if the run is being trained or has no test, was not made by commits alone, or
            does not score what it says; if it has not finished, and an earlier record has, or only
            its test is left; or if nothing can be written there. An earlier record stays.
    """
    config = directory.read_config(run_dir)
    here = directory.config_here(run_dir, data_root, None, trust=trust)
    registry.import_theirs(here)
    starts, command = starts_of(run_dir)
    last = checkpoint.load(checkpoint.last_checkpoint(run_dir))
    finished = _finished(run_dir, config, last["iteration"])
    own = _own(here, starts)
    target = _target(run_dir, records / recorded.place_of(config, own), finished=finished)
    made = _how_made(config, starts, command, last) | {"note": note} | ({"own": own} if own else {})
    files.make_folder(records, "--records")
    with tempfile.TemporaryDirectory(dir=records, prefix=".") as made_in:
        folder = Path(made_in) / target.name
        folder.mkdir()
        if finished:
            kept, tested = "model.pt", checkpoint.tested(last)["model"]
            result = _test(folder, run_dir, tested, tasks, here)
            # Beside the presets of this commit, which may be later than the run's.
            result |= published_row(config) | {"changed": changed(config)}
            if together is not None:
                result |= _ensemble(here, run_dir, together, result["tasks"])
            torch.save(tested, folder / kept)
        else:
            kept, result = "checkpoint.pt", _so_far(config, last)
            shutil.copy(checkpoint.last_checkpoint(run_dir), folder / kept)
        _write_files(folder, run_dir, kept, made, result)
        files.make_folder(target.parent, "--records")
        if target.exists():
            target.rename(Path(made_in) / "earlier")
        folder.rename(target)
    return target


def _target(run_dir: Path, target: Path, *, finished: bool) -> Path:
    """Return where the record goes; one of a finished run gives way to no other."""
    if target.exists() and not recorded.read(target).left and not finished:
        raise UserError(
            f"{run_dir}: it has not finished, and {target} is of a run that has; --records keeps "
            "this one elsewhere"
        )
    return target


def _how_made(
    config: Config, starts: list[dict[str, Any]], command: list[str], last: dict[str, Any]
) -> dict[str, Any]:
    """Return what a record says of how its run was made; ``last`` is the last checkpoint."""
    division = last.get("division")
    return {
        "command": _again(command, {"threads": config.threads} | starts[-1]),
        "starts": starts,
        "minutes": last["seconds"] / 60,
        "hardware": describe(torch.get_num_threads()) | starts[-1].get("machine", {}),
    } | ({} if division is None else {"division": division})


def _finished(run_dir: Path, config: Config, iterations: int) -> bool:
    """Say whether a run has been tested; it may have ended before its last iteration.

    Raises:
        UserError: if it goes on, or has done its ``iterations`` and was not tested.
    """
    status = directory.read_status(run_dir)
    if status is None or status["state"] == "training":
        state = "has no status.json that can be read" if status is None else "is being trained"
        raise UserError(f"{run_dir}: it {state}; a record is of a run that has ended")
    finished = status["state"] == "finished"
    if finished and not config.test_tasks:
        raise UserError(f"{run_dir}: it was not tested (--test-tasks 0), so there is no result")
    if not finished and iterations >= config.iterations:
        raise UserError(
            f"{run_dir}: its iterations are done and its test is not; the same command with "
            f"--run-dir {run_dir} finishes it"
        )
    return finished


def _write_files(
    folder: Path, run_dir: Path, kept: str, made: dict[str, Any], result: dict[str, Any]
) -> None:
    """Write what a record has beside the scores of its tasks and ``kept``, which is there."""
    kind, size = kept.removesuffix(".pt"), (folder / kept).stat().st_size
    made |= {f"{kind}_sha256": digest_of(folder / kept), f"{kind}_bytes": size}
    if size > recorded.MOST_BYTES[kept]:
        (folder / kept).unlink()
    for name, content in (("result.json", result), ("record.json", made)):
        files.write_text(folder / name, json.dumps(content, indent=1) + "\n")
    write_config(folder, run_dir)
    write_metrics(folder, run_dir)
    # A run that was stopped has drawn none.
    with contextlib.suppress(FileNotFoundError):
        shutil.copy(run_dir / "curves.png", folder / "curves.png")
    recorded.read(folder)  # whoever reads it later must be able to


def _own(config: Config, starts: list[dict[str, Any]]) -> str:
    """Return a digest of a user's own images and components, which no name tells apart; or ""."""
    files = starts[-1].get("own_files", {})
    images = None
    if config.data == "folder" or is_theirs(config.data):
        images = alone(config).worker.evaluation("test").content()
    if not files and images is None:
        return ""
    return hashlib.sha256(json.dumps([files, images], sort_keys=True).encode()).hexdigest()[:8]


def starts_of(run_dir: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return when and by which commit a run was begun and continued, and its last command.

    Raises:
        UserError: if it was not made by commits alone, or nothing says how it began; or if there
            is not what `write_config` keeps, which is not to be found out after a test.
    """
    path = run_dir / "config.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = content.get("starts")
    wrong = recorded.misfit(content, KEPT | {"starts": [recorded.START]})
    wrong = wrong or recorded.misfit(found[-1], {"command": list})
    if wrong:
        raise UserError(f"{path}: damaged: its {wrong}")
    for start in found:
        commit = start.get("git_commit")
        if not commit or commit.endswith("-dirty"):
            raise UserError(f"{run_dir}: made by {commit}: not a commit alone")
    if found[0]["iteration"]:
        raise UserError(
            f"{run_dir}: it goes on from a checkpoint after iteration {found[0]['iteration']} that "
            "does not say how the run began"
        )
    starts = [{n: of[n] for n in directory.OF_A_START if n in of} for of in found]
    return starts, found[-1]["command"]


def _test(folder: Path, run_dir: Path, model: Params, tasks: int, here: Config) -> dict[str, Any]:
    """Test the run's model again, keep each task's scores, and return the run's result.

    Raises:
        UserError: if it does not score what the run has written.
    """
    result = files.read_object(run_dir / "result.json")
    wrong = recorded.other_means(run_dir, result, here)
    if wrong:
        raise UserError(f"{run_dir / 'result.json'}: not what {NAME} says: {wrong}")
    names, values = scores_of(here, model, max(tasks, result["tasks"]))
    write_tasks(folder, "test", here.seed, names, values)
    wrong = differing(read_tasks(run_dir / NAME), read_tasks(folder / NAME))
    if wrong:
        raise UserError(f"{run_dir}: its model does not score what it says: {wrong}")
    return result


def _ensemble(config: Config, run_dir: Path, count: int, tasks: int) -> dict[str, Any]:
    """Return what the best ``count`` checkpoints score together, under names of its own.

    Raises:
        UserError: as `load_best`.
    """
    saved = load_best(run_dir, count, transductive=config.transductive)
    found = ensemble(alone(config), [one["model"] for one in saved], "test", tasks, progress=True)
    found = with_headline(found, transductive=config.transductive)
    return {"ensemble": [one["iteration"] for one in saved]} | {
        f"ensemble_{name}": found[name]
        for name in (
            *("accuracy", "ci95"),
            *("non_transductive_accuracy", "non_transductive_accuracy_ci95"),
        )
    }


def _so_far(config: Config, last: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run that has not reached its end: how far it came, and how fast."""
    iterations, seconds = last["iteration"], last["seconds"]
    rate = iterations / seconds if seconds else None
    return {
        "accuracy": None, "tasks": 0, "transductive": config.transductive,
        "non_transductive_accuracy": None, "preset": config.preset,
        **published_row(config), "changed": changed(config),
        "iterations": iterations, "iterations_left": config.iterations - iterations,
        "seconds": seconds, "iterations_per_second": rate,
        "tasks_per_second": rate and rate * config.meta_batch_size,
    }  # fmt: skip


def _again(command: list[str], start: dict[str, Any]) -> str:
    """Return the command that repeats a run, in float32 too: with as many processes and threads."""
    flags = shlex.join(_flags(command))
    processes, threads = start.get("processes", 1), start.get("threads")
    several = processes > 1
    program = "launch/local" if several else "python train_maml.py"
    return (
        f"{program} {flags}"
        + (f" --workers {processes}" if several else "")
        + (f" --threads {threads}" if threads else "")
    )


def _flags(command: list[str]) -> list[str]:
    """Return a command's arguments without those that are one machine's own."""
    kept: list[str] = []
    skip = False
    for argument in command[1:]:
        name = argument.partition("=")[0].lstrip("-").replace("-", "_")
        if skip:
            skip = False
        elif name == "config" and argument.startswith("--"):
            # It is kept beside the record.
            kept += ["--config", "config.yaml"]
            skip = "=" not in argument
        elif argument.startswith("--") and name in {*OF_A_HOST, "run_dir"}:
            skip = "=" not in argument
        else:
            kept.append(argument)
    return kept


def write_config(folder: Path, run_dir: Path) -> None:
    """Write the run's config.yaml, without what is one machine's own."""
    content = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    kept = {name: content[name] for name in KEPT}
    config = {name: v for name, v in content["config"].items() if name not in PLACES}
    text = yaml.safe_dump({"config": config, **kept}, sort_keys=False)
    files.write_text(folder / "config.yaml", text)


def write_metrics(folder: Path, run_dir: Path) -> None:
    """Write about `ROWS` rows of training, and all others."""
    rows = files.read_rows(run_dir / "metrics.jsonl")
    training = [row for row in rows if "split" not in row]
    every = max(1, len(training) // ROWS)
    kept = {id(row) for row in training[every - 1 :: every]}
    lines = [json.dumps(row) for row in rows if "split" in row or id(row) in kept]
    files.write_text(folder / "metrics.jsonl", "".join(f"{line}\n" for line in lines))
