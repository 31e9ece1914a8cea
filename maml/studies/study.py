"""``python -m launch.study SWEEP_FOLDER``: keep what a sweep has found.

    python -m launch.study runs/sweeps/mamlpp-parts --against part=none

Into ``launch/studies/<name of the sweep's file>`` goes, of every trial, what a record has of a run
but for the parameters: config.yaml, result.json, metrics.jsonl (thinned) and test_tasks.csv. Beside
them are the sweep's file, study.json (values, commits, hardware) and report.md with its figures. So
the tables of the documentation can be made anew, and other comparisons be asked for:
``python -m launch.compare launch/studies/NAME:part=lslr launch/studies/NAME:part=msl``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from maml.config.parser import Parser
from maml.errors import UserError
from maml.run import files
from maml.run.provenance import describe
from maml.run.reading import read
from maml.studies import REPOSITORY, record, tables
from maml.studies.arms import STUDY, Arm, arm_of, read_study
from maml.studies.recorded import made_anew
from maml.studies.sweeping import file
from maml.studies.sweeping.points import settings
from maml.studies.sweeping.sweep import FINISHED, Trial, kept

STUDIES = REPOSITORY / "launch" / "studies"


def main(arguments: list[str]) -> int:
    """Keep a sweep."""
    parser = Parser(prog="python -m launch.study", description="Keep what a sweep has found.")
    parser.add_argument("folder", metavar="SWEEP_FOLDER", type=Path)
    parser.add_argument(
        "--against",
        metavar="SETTING",
        required=True,
        help="the setting that the others are compared with, as part=none",
    )
    parser.add_argument("--note", default="", help="what a reader of the study should know")
    parser.add_argument("--studies", type=Path, default=STUDIES, help="where it goes")
    options = parser.parse_args(arguments)
    print(f"study {keep(options.folder, options.against, options.note, options.studies)}")
    return 0


def keep(folder: Path, against: str, note: str, studies: Path) -> Path:
    """Keep the sweep in ``folder`` below ``studies``, in place of an earlier one; return where.

    Raises:
        UserError: if a trial has not finished, was not made by a commit alone or was not tested; or
            if no setting is called ``against``. An earlier study stays.
    """
    if not (folder / "journal.log").is_file():
        raise UserError(f"{folder}: no sweep there")
    sweep = kept(folder)
    trials = sweep.trials()
    if against not in (names := sweep.settings(trials)):
        raise UserError(
            f"--against {against}: no such setting; there are {', '.join(names) or 'none'}"
        )
    if sweep.to_come(None, trials) or any(trial.state != FINISHED for trial in trials):
        raise UserError(f"{folder}: {sweep.progress(None)}; all trials of a study are finished")
    target = studies / folder.resolve().name
    with made_anew(target, studies, "--studies") as made:
        shutil.copy(folder / "sweep.yaml", made / "sweep.yaml")
        study = {
            "sweep": sweep.study.study_name, "against": against, "note": note,
            "hardware": describe(threads=1), "trials": [_kept(trial, made) for trial in trials],
        }  # fmt: skip
        files.write_text(made / STUDY, json.dumps(study, indent=1) + "\n")
        said = sweep.file.said.get("description") or target.name
        text = f"# {said}\n\n{''.join(tables.compared(_arms(made), made))}\n{measured_on(made)}\n"
        files.write_text(made / "report.md", text)
    return target


def _kept(trial: Trial, made: Path) -> dict[str, Any]:
    """Copy what is kept of a trial; return what study.json says of it."""
    commits = {start["git_commit"] for start in record.starts_of(trial.run_dir)}
    run = made / "trials" / trial.run_dir.name
    run.mkdir(parents=True)
    record.keep(run, trial.run_dir)
    return {
        "run": str(run.relative_to(made)), "point": trial.record.params, "value": trial.value,
        "git_commits": sorted(commits),
    }  # fmt: skip


def _arms(study: Path) -> list[Arm]:
    """Return a study's settings, that which the others are compared with first."""
    said = read_study(study)
    runs = settings(
        file.read(study / "sweep.yaml").varied,
        ((trial["point"], read(study / trial["run"])) for trial in said["trials"]),
    )
    return [arm_of(name, runs[name]) for name in dict.fromkeys([said["against"], *runs])]


def table(study: Path) -> str:
    """Return a study's tables in Markdown: means, and differences with their verdicts."""
    return tables.compared(_arms(study))[0]


def measured_on(study: Path) -> str:
    """Return a sentence: on what a study was measured, and by which commits."""
    said = read_study(study)
    hardware = said["hardware"]
    commits = sorted({commit[:7] for trial in said["trials"] for commit in trial["git_commits"]})
    words = f"{hardware['cores']} cores of {hardware['processor']}, {hardware['date']}"
    by = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    return f"{words}, {by}." + (f" {said['note']}" if said["note"] else "")
